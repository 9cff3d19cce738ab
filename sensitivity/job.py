"""What the user asks for: the job file, parsed and validated before TensorFlow or Ray is imported."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, ValidationError, model_validator

from .addresses import is_below, place_at, scheme
from .asked import PRODUCT_KEYS, PRODUCTS
from .errors import Refused, suggested
from .findings import refusals, unknown_key
from .job_files import require_model_file, require_run_path, require_series_file
from .sections import (
    Auto,
    Listed,
    ModelSection,
    Named,
    Number,
    Positive,
    RunSection,
    Section,
    SeriesSection,
    WindowsSection,
)

KNOBS = ("kernel", "windows_per_call", "experimental_use_pfor", "parallel_iterations")
ArrayFile = Annotated[str, Field(pattern=r"^[^\x00]+\.npy$")]
_SLICE = re.compile(r"(-?\d{1,18})?:(-?\d{1,18})?(:([1-9]\d{0,17})?)?")


class SensitivitySection(Section):
    """d(of) / d(wrt), and how to compute it.

    of: "output", one of several outputs, an inner layer by name, or "loss". wrt: "input", one of several inputs, an
    inner layer by name, "weights", or "weights:" and a layer or a pattern of their names. loss: a name that
    `keras.losses.get` takes, or its table of class_name and config; of labels whose last one is `lead` steps after the
    window's last step.
    product: what of the derivative; its own keys are in `asked.PRODUCTS`.
    output_steps, outputs: only of these steps (numbers, or a slice as text) and channels (names or numbers); None: of
    all. max_lag: only of lags up to it; None: of all.
    """

    product: str = "jacobian"
    of: str = "output"
    output_steps: Annotated[Annotated[tuple[int, ...], Listed] | str, Field(min_length=1)] | None = None
    outputs: Annotated[tuple[str | int, ...], Named, Field(min_length=1)] | None = None
    wrt: str = "input"
    loss: str | dict[str, Any] | None = None
    lead: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    kernel: Literal["auto", "gradient", "batch_jacobian", "forward", "scan"] = "auto"
    windows_per_call: Positive | Auto = "auto"
    experimental_use_pfor: bool | Auto = "auto"
    parallel_iterations: Positive | Auto = "auto"
    max_lag: Annotated[int, Field(ge=0), Number] | None = None
    vectors: Annotated[tuple[Literal["sum", "mean", "last"], ...], Listed, Field(min_length=1)] | ArrayFile | None = (
        None
    )
    directions: Annotated[tuple[str, ...], Listed, Field(min_length=1)] | ArrayFile | None = None
    baseline: Literal["zero", "mean"] | Annotated[int, Field(ge=0)] | ArrayFile | None = None
    steps: Annotated[int, Field(ge=2, le=512)] | None = None
    noise: Annotated[FiniteFloat, Field(gt=0)] | None = None
    samples: Annotated[int, Field(ge=1, le=4096)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None

    @property
    def knobs(self) -> dict[str, Any]:
        """How to compute it, without what."""
        return self.model_dump(include=set(KNOBS))

    @property
    def selection(self) -> dict[str, Any]:
        """Of which outputs and lags."""
        return self.model_dump(include={"output_steps", "outputs", "max_lag"})

    @property
    def options(self) -> dict[str, Any]:
        """Of the product alone, those that are given."""
        return {key: value for key in PRODUCT_KEYS if (value := getattr(self, key)) is not None}

    @property
    def array_files(self) -> dict[str, str]:
        """Keys whose numbers are in a file, and its path."""
        return {key: value for key, value in self.options.items() if isinstance(value, str) and value.endswith(".npy")}

    @model_validator(mode="after")
    def _of_the_loss(self) -> SensitivitySection:
        if isinstance(self.loss, dict) and not _is_json(self.loss):
            raise Refused(
                "sensitivity.loss",
                given=str(self.loss),
                allowed="a table with class_name and config, of texts, numbers and lists",
                remedy="write it as keras.losses.serialize gives it",
            )
        if self.of != "loss" and (self.loss, self.lead) != (None, None):
            key = "loss" if self.loss is not None else "lead"
            raise Refused(
                f"sensitivity.{key}",
                given=f'{getattr(self, key)!r}, and of = "{self.of}"',
                allowed='with of = "loss"',
                remedy='set of = "loss", or leave it out',
            )
        return self

    @model_validator(mode="after")
    def _of_the_product(self) -> SensitivitySection:
        if self.product not in PRODUCTS:
            raise Refused(
                "sensitivity.product",
                given=f'"{self.product}"',
                allowed=", ".join(f'"{name}"' for name in PRODUCTS),
                remedy=suggested(self.product, PRODUCTS, "leave it out for the jacobian"),
            )
        for key in self.options:
            if key not in PRODUCTS[self.product]:
                owners = [name for name, keys in PRODUCTS.items() if key in keys]
                raise Refused(
                    f"sensitivity.{key}",
                    given=f'{getattr(self, key)!r} for product = "{self.product}"',
                    allowed=f"with {' or '.join(owners)} alone",
                    remedy=f'leave it out, or set product = "{owners[0]}"',
                )
        for key, given in self.options.items():
            if isinstance(given, tuple) and len(set(given)) < len(given):
                raise Refused(f"sensitivity.{key}", given=given, allowed="each once", remedy="take the repeated out")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> SensitivitySection:
        if isinstance(self.output_steps, str) and not _SLICE.fullmatch(self.output_steps):
            raise Refused(
                "sensitivity.output_steps",
                given=f'"{self.output_steps}"',
                allowed='a list of steps, or a slice of them such as "10:", ":-1" or "::24"',
                remedy="leave it out for all steps",
            )
        tape_knobs = {self.experimental_use_pfor, self.parallel_iterations} != {"auto"}
        if self.kernel in ("gradient", "scan") and tape_knobs:
            raise Refused(
                "sensitivity.kernel",
                given=f'"{self.kernel}" together with experimental_use_pfor or parallel_iterations',
                allowed="those two belong to batch_jacobian and forward",
                remedy='leave both out, or set kernel = "batch_jacobian"',
            )
        if self.experimental_use_pfor is True and self.parallel_iterations == 1:
            raise Refused(
                "sensitivity.parallel_iterations",
                given="1, with pfor",
                allowed="2 or more with pfor (a limit of TensorFlow's)",
                remedy="raise it, or set experimental_use_pfor = false",
            )
        return self


class Job(Section):
    """One job, with absolute paths. `directory` is where a model function's module is looked for first."""

    model: ModelSection
    series: SeriesSection
    windows: WindowsSection = WindowsSection()
    sensitivity: SensitivitySection = SensitivitySection()
    run: RunSection
    directory: str

    @model_validator(mode="after")
    def _columns_of_inputs(self) -> Job:
        """What inputs take are the features."""
        columns = self.model.columns
        twice = sorted({name for name in columns if columns.count(name) > 1})
        if twice:
            raise Refused(
                "model.inputs",
                given=f"{', '.join(twice)} more than once",
                allowed="each column once",
                remedy="where two inputs take one column, have it in the series twice, by two names",
            )
        if columns and self.series.features not in (None, columns):
            raise Refused(
                "series.features",
                given=", ".join(self.series.features or ()),
                allowed=f"{', '.join(columns)}: what model.inputs name, in this order",
                remedy="leave it out",
            )
        if not columns:
            return self
        series = {**self.series.model_dump(exclude_unset=True), "features": columns}
        try:
            return self.model_copy(update={"series": SeriesSection.model_validate(series)})
        except ValidationError as error:
            raise of_inputs(refusals(error, series, SeriesSection)) from error

    @model_validator(mode="after")
    def _labels_of_a_loss(self) -> Job:
        wanted = {"series.labels": self.series.labels, "sensitivity.loss": self.sensitivity.loss}
        gone = [key for key, value in wanted.items() if value is None]
        if self.sensitivity.of == "loss" and len(gone) == 1:
            raise Refused(
                gone[0],
                given='nothing, and of = "loss"',
                allowed="columns of the series, one for each output, and a loss of Keras to compare them by",
                remedy="name what the model was trained with",
            )
        if self.sensitivity.of != "loss" and self.series.labels is not None:
            raise Refused(
                "series.labels",
                given=f'{", ".join(self.series.labels)}, and of = "{self.sensitivity.of}"',
                allowed='with of = "loss"',
                remedy='set sensitivity.of = "loss", or leave them out',
            )
        return self

    @classmethod
    def load(cls, path: str | os.PathLike[str], elsewhere: Collection[str] = ()) -> Job:
        """Read and validate a job file; relative paths are relative to it.

        elsewhere: folders and URLs that are there for those who run the job: what is below them is not looked for.

        Raises `Refused` (a ValueError) naming the key, what was given, what is allowed and what to do.
        """
        file = Path(path)
        job = cls.parse(_read_toml(file), file.resolve().parent)
        job.require_files(elsewhere)
        return job

    @classmethod
    def parse(cls, content: dict[str, Any], directory: Path) -> Job:
        """Validate the content of a job file without touching the files it names."""
        unknown = set(content) - (set(cls.model_fields) - {"directory"})
        try:
            job = cls.model_validate({**content, "directory": str(directory)})
        except ValidationError as error:
            raise refusals(error, content, cls) from None
        if unknown:  # "directory" is ours to fill, not a key of the file
            raise unknown_key("directory", content["directory"], list(cls.model_fields)[:-1])
        return job._resolved(directory)

    def _resolved(self, directory: Path) -> Job:
        sections = {"series": self.series, "run": self.run} | ({} if self.model.is_function else {"model": self.model})

        def absolute(key: str, section: Any) -> Any:
            return section.model_copy(update={"path": _absolute(f"{key}.path", section.path, directory)})

        asked = self.sensitivity
        files = {key: _absolute(f"sensitivity.{key}", path, directory) for key, path in asked.array_files.items()}
        resolved = {key: absolute(key, section) for key, section in sections.items()}
        return self.model_copy(update={**resolved, "sensitivity": asked.model_copy(update=files)})

    def require_files(self, elsewhere: Collection[str] = ()) -> None:
        """Refuse a model or series that is not there, or of a kind that is not served."""
        model, series, run = self.model.path, self.series.path, self.run.path
        if not self.model.is_function:
            require_model_file(model, look=not is_below(model, elsewhere))
        require_series_file(series, look=not is_below(series, elsewhere))
        if not is_below(run, elsewhere):
            require_run_path(run)


def of_inputs(refusal: Refused) -> Refused:
    """A refusal of features, which are named as what inputs take."""
    if refusal.key != "series.features":
        return refusal
    return Refused(
        "model.inputs", given=refusal.given, allowed=refusal.allowed, remedy="name other columns of the series there"
    )


def _is_json(table: dict[str, Any]) -> bool:
    try:
        json.dumps(table, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
        repr(content)  # no message could tell a number of thousands of digits
        return content
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise Refused(
            "job file", given=f"{file} ({reason})", allowed="a readable TOML file", remedy="check the path"
        ) from error
    except (ValueError, RecursionError) as error:
        raise Refused(
            "job file", given=f"{file}: {error}", allowed="valid TOML", remedy="mend the file at that line"
        ) from error


def _absolute(key: str, path: str, directory: Path) -> str:
    if scheme(path):
        _refused_as(key, place_at, path)
        return path
    try:
        return os.path.normpath(directory / Path(path).expanduser())
    except RuntimeError as error:
        raise Refused(
            key, given=f"{path} ({error})", allowed="~ of a user of this machine", remedy="write the path out"
        ) from error


def _refused_as(key: str, act: Callable[[str], Any], path: str) -> Any:
    """Name the key of the job file that a path stands under."""
    try:
        return act(path)
    except Refused as refusal:
        raise Refused(key, given=path, allowed=refusal.allowed, remedy=refusal.remedy) from refusal
