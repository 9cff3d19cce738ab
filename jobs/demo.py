"""The whole job on real data: an hourly series of weather and soil moisture, and a network trained on the spot.

The network sees 20 hours of weather and of soil moisture at three depths and predicts by how much the moisture at
10 cm will have changed 24 hours later. A change, not a level: a level is answered by the last value, and the
Jacobian of that answer says nothing. 24 hours, since a day's drying and a night's rain both count.
"""

from __future__ import annotations

import gzip
import time
from importlib import resources
from pathlib import Path

import numpy as np
import xarray as xr

from sensitivity import query
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.store import JOB

from .driver import How, run_job, say
from .resources import local, quiet
from .status import DONE, conclude
from .tables import Rows, table

HOURS, LEAD = 20, 24
TARGET = "moisture_10cm"
HELD_OUT = np.datetime64("2016-01-01")
EPOCHS, BATCH = 8, 128
SERIES, MODEL, JOB_FILE, RUN = "schwingbach.csv", "soil.keras", "soil.toml", "runs/soil"
REPORT = "report.html"
JOB_TEXT = f"""\
# By how much will soil moisture have changed in {LEAD} hours, and what decides it?
[model]
path = "{MODEL}"        # a trained Keras model: ({HOURS} hours, 9 features) -> change of soil moisture, % of volume

[series]
path = "{SERIES}"   # hourly weather and soil moisture, 2014-2016
time = "time"              # all other columns are features, in the order the model takes them

[run]
path = "{RUN}"
"""


def run_demo(path: Path) -> int:
    """Train, run, tell, draw, all inside `path`; a second call goes on with what the first one left."""
    start = time.monotonic()
    if path.exists() and not path.is_dir():
        raise Refused(
            "PATH", given=path, allowed="a directory, or a path where one can be made", remedy="choose another"
        )
    path.mkdir(parents=True, exist_ok=True)
    if not (path / RUN / JOB).exists():
        _write_inputs(path)
    job = Job.load(path / JOB_FILE)
    say(f"\nThe job {path / JOB_FILE}:\n\n{JOB_TEXT}")
    status = conclude(run_job(job, How()))
    if status == DONE:
        _tell(path)
        say(f"\n{time.monotonic() - start:.0f} s in all. Try next:\n{_next_commands(path)}")
    return status


def _write_inputs(path: Path) -> None:
    with resources.files("jobs").joinpath("data/schwingbach.csv.gz").open("rb") as packed:
        (path / SERIES).write_bytes(gzip.decompress(packed.read()))
    say(f"Hourly weather and soil moisture at the Schwingbach, Hesse (University of Giessen): {path / SERIES}")
    _train(path / SERIES, path / MODEL)
    (path / JOB_FILE).write_text(JOB_TEXT)


def _train(series: Path, file: Path) -> None:
    """Train on 2014 and 2015, say how good the model is in 2016, save it."""
    import pandas as pd

    with quiet():
        from sensitivity.loading import keras

        local()  # TensorFlow looks for GPUs, and says so
    table = pd.read_csv(series, parse_dates=["time"])
    values = table.drop(columns="time").to_numpy(np.float32)
    moisture = table[TARGET].to_numpy(np.float32)
    last = np.arange(HOURS - 1, len(values) - LEAD)
    windows = np.lib.stride_tricks.sliding_window_view(values, HOURS, axis=0).swapaxes(1, 2)[: len(last)]
    change = moisture[last + LEAD] - moisture[last]
    whole = np.isfinite(windows).all(axis=(1, 2))
    times = table["time"].to_numpy()
    train = whole & (times[last + LEAD] < HELD_OUT)
    test = whole & (times[last - HOURS + 1] >= HELD_OUT)

    seen = values[times < HELD_OUT]
    spread = float(change[train].std())
    keras.utils.set_random_seed(2014)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((HOURS, values.shape[1])),
            layers.Normalization(mean=np.nanmean(seen, axis=0), variance=np.nanvar(seen, axis=0)),
            layers.LSTM(120, dropout=0.1),
            layers.Dense(100, activation="relu"),
            layers.Dense(50, activation="relu"),
            layers.Dense(1),
            layers.Rescaling(spread),
        ]
    )
    model.compile(keras.optimizers.Adam(5e-4), loss="mse")
    say(f"Training LSTM(120) → Dense(100) → Dense(50) → 1 on {train.sum():,} windows of 2014 and 2015, {EPOCHS} epochs")
    for epoch in range(EPOCHS):
        history = model.fit(windows[train], change[train], batch_size=BATCH, verbose=0)
        say(f"  epoch {epoch + 1:2}, loss {history.history['loss'][0]:.3f}")
    predicted = model.predict(windows[test], batch_size=4096, verbose=0)[:, 0]
    skill = 1 - np.square(change[test] - predicted).mean() / np.square(change[test]).mean()
    agree = np.corrcoef(predicted, change[test])[0, 1]
    say(
        f"Held-out 2016, {test.sum():,} windows: the model explains {skill:.0%} of the squared change "
        f"over {LEAD} hours\n(assuming no change explains 0 %), and correlates with it at {agree:.2f}"
    )
    model.save(file)


def _tell(path: Path) -> None:
    import dask

    from sensitivity import plots, report

    kinds = ("importance", "lag-profile", "heatmap")
    (data,) = dask.compute(plots.wanted(query.open_run(path / RUN), kinds))
    found = sorted(query.rows(data["importance"]), key=lambda row: -_number(row["importance"]))
    shown: Rows = [
        {name: row[name] for name in ("feature", "mean_abs", "input_std", "importance", "share")} for row in found
    ]
    print(table(shown, "\nImportance: mean |∂ change / ∂ feature| × the feature's standard deviation, % of volume"))
    by_lag = plots.influence(data["lag-profile"])
    print(table(_profile(by_lag), "\nLag profile: the same by lag (hours back), the five features that matter most"))
    for kind in kinds[1:]:
        plots.save(plots.draw(data[kind], kind), path / f"{kind}.png")
        say(f"drawn: {path / kind}.png")
    say(f"written: {report.write(path / RUN, path / REPORT)}, all of it as one page for a browser")


def _profile(by_lag: xr.DataArray) -> Rows:
    most = by_lag.sum("lag").to_series().nlargest(5).index
    return [
        {"lag": int(lag), **{feature: float(by_lag.sel(lag=lag, feature=feature)) for feature in most}}
        for lag in sorted(by_lag["lag"].values)
    ]


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _next_commands(path: Path) -> str:
    run = path / RUN
    return (
        f"  sensitivity status {run}\n"
        f"  sensitivity query {run} lag-profile --format csv\n"
        f"  python -c \"import sensitivity; print(sensitivity.open_run('{run}'))\""
    )
