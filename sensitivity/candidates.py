"""Which settings are worth a trial, and the one to take untried: pure, from shapes and what the user gave."""

from __future__ import annotations

from dataclasses import replace

from .errors import Refused
from .facts import CallFacts
from .job import SensitivitySection
from .kernels import KERNELS, why_not
from .plan import MiB, at_once, call_memory, human_bytes
from .setting import Setting

# Operations in a graph for XLA. An LSTM unrolled over 30 steps has 540 and compiles for 10 seconds, over 100 steps
# 1,800 and two minutes: beyond the first figure XLA is tried last, beyond the second never.
MANY_OPERATIONS, MOST_OPERATIONS = 600, 1000
FIRST_BYTES = 32 * MiB  # of a first call: about what caches hold
# Of a first call of the plain tape, which may be the only one: large calls share its overhead, that of loops above all.
PLAIN_BYTES, PLAIN_LOOPED_BYTES = 512 * MiB, 1024 * MiB
# And enough windows to share its overhead, which is large where TensorFlow runs a loop, not XLA.
FIRST_WINDOWS, FIRST_RECURRENT, FIRST_LOOPED = 8, 32, 64
MOST_SAMPLES = 4096  # of a call, where a window has many points
RULE_WINDOWS, RULE_ROWS = 1024, 8192  # windows, and windows × outputs, of an untried call


def choose(
    wanted: SensitivitySection,
    facts: CallFacts,
    memory: int,
    windows: int,
    *,
    key: str = "run.memory_per_worker",
    gpu: bool = False,
) -> Setting:
    """The setting to take untried, with `memory` bytes for one call, and at most `windows` windows to do at once.

    The first of the `families` that fits; where none does, fewer outputs a call of the one that takes least. What the
    user gives is kept; `Refused` where it cannot be, in the name of `key` where the memory is too small for a window.
    """
    able = families(wanted, facts, gpu=gpu)
    if wanted.windows_per_call != "auto":
        given = [replace(setting, windows_per_call=min(wanted.windows_per_call, windows)) for setting in able]
        fits = [setting for setting in given if call_memory(facts, setting) <= memory]
        return fits[0] if fits else min(given, key=lambda setting: call_memory(facts, setting))
    most = max(1, min(RULE_WINDOWS, RULE_ROWS // facts.rows))
    sized = (largest(setting, facts, memory, windows, most) for setting in able)
    fitting = next((setting for setting in sized if setting is not None), None)
    return fitting or split(min(able, key=lambda setting: call_memory(facts, setting)), facts, memory, key)


def families(wanted: SensitivitySection, facts: CallFacts, *, gpu: bool = False) -> list[Setting]:
    """Every way to serve the model that the user leaves open, the one expected to be fastest first, of one window each.

    One output a window: `gradient`. Fewer inputs than outputs: `forward` too. XLA where it gives the tape's numbers.
    Recurrent models: a scan, then a loop over outputs, since pfor needs many times its memory.
    """
    _require_able(wanted, facts)
    rows = None if wanted.parallel_iterations == "auto" else wanted.parallel_iterations
    most = None if facts.group == facts.rows else facts.group
    found = [
        Setting(kernel, 1, pfor, rows, xla, _lost(kernel, facts, pfor, xla), outputs_per_call=most)
        for kernel in _kernels(wanted, facts)
        for pfor, xla in _ways(kernel, facts)
        if kernel in ("gradient", "scan") or (pfor in _pfor(wanted) and not (pfor and rows == 1))
    ]
    found.sort(key=lambda setting: compiles_long(setting, facts))
    once = facts.rows_of in ("outputs", "vectors")  # cuDNN's recurrent layers have no second derivative
    if gpu and once and facts.recurrent and not facts.has_loops_alone:
        one_by_one = [s for s in found if not s.xla and (s.kernel == "gradient" or not s.experimental_use_pfor)]
        found = [replace(s, use_cudnn=True) for s in one_by_one if s.kernel not in ("forward", "scan")] + found
    return found


def in_order(able: list[Setting], facts: CallFacts) -> list[Setting]:
    """The families in the order of their trials: the plain tape first, so that what is chosen is at least as fast.

    A scan that XLA compiles goes before it through recurrent layers: it is faster by far, and takes less memory.
    """
    plainest = [setting for setting in able if setting.kernel == "batch_jacobian" and not setting.xla]
    loop = next((setting for setting in plainest if not setting.use_cudnn), None)  # where pfor is not for this model
    plain = next(filter(is_plain, able), loop)
    if plain is None:
        return able
    scans = [setting for setting in able if setting.kernel == "scan" and setting.xla and facts.recurrent]
    if able[0] not in scans:
        scans = []
    return [*scans, plain, *(setting for setting in able if setting is not plain and setting not in scans)]


def is_plain(setting: Setting) -> bool:
    """Whether it is what people write: `tf.function` around a tape's gradient, or its `batch_jacobian` by pfor."""
    tape = setting.kernel in ("gradient", "batch_jacobian") and setting.experimental_use_pfor
    return tape and not setting.xla and not setting.use_cudnn and setting.parallel_iterations is None


def effort(setting: Setting, facts: CallFacts) -> float:
    """What tracing and compiling a family takes, in units that only compare families of one model.

    Measured on models of 20 to 550 operations, two recurrent ones among them: a loop's graph has about three times
    the forward pass's operations, pfor's six times, over a recurrent loop fifteen times; forward mode has twice these.
    XLA takes about four times as long as tracing, and longer by operation in large graphs.
    """
    if setting.kernel == "scan":
        return _SCAN_EFFORT * facts.operations * (2 if setting.xla else 1)
    looped = not setting.experimental_use_pfor
    written = _LOOP_EFFORT if looped else _RECURRENT_PFOR_EFFORT if facts.recurrent else _PFOR_EFFORT
    if setting.kernel == "gradient":
        written = _GRADIENT_EFFORT
    compiled = _XLA_EFFORT * max(1.0, facts.operations / _LARGE_GRAPH) if setting.xla else 1.0
    return written * compiled * (2 if setting.kernel == "forward" else 1) * facts.operations


_GRADIENT_EFFORT, _LOOP_EFFORT, _PFOR_EFFORT, _RECURRENT_PFOR_EFFORT = 2.0, 4.0, 6.0, 15.0
_SCAN_EFFORT, _XLA_EFFORT, _LARGE_GRAPH = 12.0, 4.0, 300


def compiles_long(setting: Setting, facts: CallFacts) -> bool:
    """Whether XLA takes long: over an unrolled loop, or over a loop's gradient's gradient. A scan has its own loops."""
    twice = bool(facts.recurrent) and facts.rows_of in ("directions", "derivatives")
    return setting.xla and setting.kernel != "scan" and (twice or facts.operations > MANY_OPERATIONS)


def _kernels(wanted: SensitivitySection, facts: CallFacts) -> list[str]:
    if wanted.kernel != "auto":
        return [wanted.kernel]
    tape_asked = wanted.experimental_use_pfor != "auto" or wanted.parallel_iterations != "auto"
    if tape_asked:
        return ["batch_jacobian"]
    scan = ["scan"] if facts.scan else []
    if why_not("gradient", facts) is None:
        alone = facts.rows == 1 or facts.only_gradient
        return ["gradient", *scan] if alone else [*scan, "batch_jacobian", *_forward(facts), "gradient"]
    forward = _forward(facts)
    return [*scan, "batch_jacobian", *forward] if facts.recurrent else [*forward, "batch_jacobian", *scan]


def _forward(facts: CallFacts) -> list[str]:
    """Where it has fewer columns to go through than others have rows."""
    return ["forward"] if facts.source_size < facts.rows and why_not("forward", facts) is None else []


def _pfor(wanted: SensitivitySection) -> tuple[bool, ...]:
    return (True, False) if wanted.experimental_use_pfor == "auto" else (wanted.experimental_use_pfor,)


def _ways(kernel: str, facts: CallFacts) -> list[tuple[bool, bool]]:
    """(pfor, XLA) that are possible, best first."""
    ways = [(False, True), (False, False), (True, False), (True, True)]
    if kernel in ("gradient", "scan"):  # there is nothing to loop over
        ways = [(True, True), (True, False)]
    elif not facts.recurrent:
        ways = [(True, True), (False, False), (True, False), (False, True)]
    return [(pfor, xla) for pfor, xla in ways if _why_not(kernel, facts, pfor, xla) is None]


def _why_not(kernel: str, facts: CallFacts, pfor: bool, xla: bool) -> str | None:
    return why_not(kernel, facts, pfor=pfor, xla=xla) or (why_no_xla(kernel, facts) if xla else None)


def why_no_xla(kernel: str, facts: CallFacts) -> str | None:
    """Why XLA is not for this model, or None where it is.

    XLA rounds differently. At a jump of the derivative, such as a ReLU's, that lands one window in ten thousand on
    the other side of the jump: by rights either is the derivative there, but it is not what the tape gives.
    """
    if facts.operations > MOST_OPERATIONS and kernel != "scan":  # which has loops of its own
        return f"{facts.operations:,} operations would take minutes to compile"
    if facts.source.loops and len(facts.recurrent) > 1:
        return "a recurrent loop within the loop over samples has shapes that it does not know"
    if facts.only_gradient and facts.has_loops_alone:
        return "a SavedModel's loops have shapes that it does not know"
    return None if facts.smooth else "the model's derivative has jumps, where another rounding shows"


def _lost(kernel: str, facts: CallFacts, pfor: bool, xla: bool) -> tuple[str, ...]:
    """XLA, and for a recurrent model the scan: what would have been faster, and why it cannot be had."""
    no_xla = None if xla else _why_not(kernel, facts, pfor, True)
    no_scan = facts.no_scan if facts.recurrent and not (facts.scan or facts.only_gradient) else None
    no_pfor = facts.no_pfor if kernel in ("batch_jacobian", "forward") else None
    reasons = {"XLA": no_xla, "scan": no_scan, "pfor": no_pfor, "kernels but gradient": facts.only_gradient}
    return (*facts.lost, *facts.unreached, *(f"{what}: {reason}" for what, reason in reasons.items() if reason))


def _require_able(wanted: SensitivitySection, facts: CallFacts) -> None:
    kernels = _kernels(wanted, facts)
    reasons = [why_not(kernel, facts, pfor=pfor) for kernel in kernels for pfor in _pfor(wanted)]
    if None not in reasons:
        able = [name for name in KERNELS if why_not(name, facts) is None]
        raise Refused(
            "sensitivity.kernel",
            given=f'"{kernels[0]}": {reasons[0]}',
            allowed=", ".join(f'"{name}"' for name in ("auto", *able)),
            remedy='set it to "auto", and leave experimental_use_pfor out',
        )


# ---- sizes of calls --------------------------------------------------------------------------------


def samples(windows: int, facts: CallFacts) -> int:
    """Samples that calls of so many windows have: all points of each window, up to a number that fills any call."""
    return max(windows, min(windows * facts.points, MOST_SAMPLES))


def even(size: int, windows: int) -> int:
    """About `size` windows a call, such that `windows` are calls of one size, none of them filled up."""
    return -(-windows // -(-windows // min(size, windows)))


def largest(setting: Setting, facts: CallFacts, memory: int, windows: int, most: int) -> Setting | None:
    """The setting with the most windows a call up to `most` (of powers of two, made even) that fit; None: not one."""
    size = 1 << ((windows - 1).bit_length() if most >= windows else most.bit_length() - 1)
    while size:
        sized = replace(setting, windows_per_call=even(size, windows))
        if call_memory(facts, sized) <= memory:
            return sized
        size //= 2
    return None


def halved(setting: Setting, facts: CallFacts) -> Setting | None:
    """Half the windows a call; of a single window no pfor over inputs, else half the outputs; None: it is smallest."""
    outputs = setting.outputs_per_call or facts.rows
    if setting.windows_per_call > 1:
        return replace(setting, windows_per_call=setting.windows_per_call // 2)
    if setting.kernel == "forward" and setting.experimental_use_pfor:
        return replace(setting, experimental_use_pfor=False, parallel_iterations=None)
    fewer = _half(outputs, setting, facts)
    return replace(setting, outputs_per_call=fewer) if fewer else None


def _half(outputs: int, setting: Setting, facts: CallFacts) -> int:
    """Half the outputs, 0 where there is no half; a scan takes those of whole steps."""
    if facts.indivisible:
        return 0
    of_steps = setting.kernel == "scan" and facts.scan and facts.rows_of == "outputs"
    unit = facts.scan.outputs or 1 if of_steps and facts.scan else 1
    return outputs // 2 // unit * unit


def split(setting: Setting, facts: CallFacts, memory: int, key: str) -> Setting:
    """One window a call, and as many of its outputs as fit; `Refused` where a single one does not."""
    setting = replace(setting, windows_per_call=1)
    outputs = setting.outputs_per_call or facts.rows
    while call_memory(facts, setting) > memory:
        outputs = _half(outputs, setting, facts)
        if not outputs:
            raise Refused(
                key,
                given=f"{human_bytes(memory)} for one call",
                allowed=f"{human_bytes(call_memory(facts, setting))} or more, projected for a single window by "
                f"{setting}",
                remedy="give more memory; in a job, run fewer workers, lower sensitivity.parallel_iterations, "
                "or set sensitivity.experimental_use_pfor = false",
            )
        setting = replace(setting, outputs_per_call=outputs)
    return setting


def _few(setting: Setting, facts: CallFacts) -> int:
    if is_plain(setting):
        return FIRST_RECURRENT
    if setting.xla:
        return FIRST_WINDOWS
    if setting.over_rows and not setting.experimental_use_pfor:
        return FIRST_LOOPED
    return FIRST_RECURRENT if facts.recurrent else FIRST_WINDOWS


def _enough(setting: Setting, facts: CallFacts) -> int:
    """Bytes that a first call may take, though some windows would take less."""
    if not is_plain(setting):
        return FIRST_BYTES
    return PLAIN_LOOPED_BYTES if facts.recurrent else PLAIN_BYTES


def first_size(setting: Setting, facts: CallFacts, memory: int, windows: int) -> Setting | None:
    """The setting for its first trial: a call that caches may hold, or of a few windows; of fewer rows at once where
    not even one fits.
    """
    enough = max(_enough(setting, facts), call_memory(facts, replace(setting, windows_per_call=_few(setting, facts))))
    sized = largest(setting, facts, min(memory, enough), windows, windows)
    if sized is not None:
        return sized
    one = replace(setting, windows_per_call=1)
    rows = at_once(facts, setting)
    while rows > 3 and setting.parallel_iterations is None:
        rows //= 2
        narrow = replace(one, parallel_iterations=rows)
        if call_memory(facts, narrow) <= memory:
            return narrow
    return None
