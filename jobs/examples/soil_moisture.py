"""What decides how soil moisture will change? A run's derivatives, asked from Python.

    sensitivity demo
    python -m jobs.examples.soil_moisture [sensitivity-demo/runs/soil]

Each `# %%` begins a cell: Jupyter (with jupytext), VS Code, PyCharm and Spyder open the file as a notebook. As a script
it prints what it finds and draws into the working directory.
"""

# %% A run. Results are Dask arrays with labels: nothing is read before it is asked for.

import sys

import dask
import numpy as np
import xarray as xr

import sensitivity
from sensitivity import plots, query

given = [argument for argument in sys.argv[1:2] if not argument.startswith("-")]  # as a notebook's kernel has them
RUN = given[0] if given else "sensitivity-demo/runs/soil"
ds = sensitivity.open_run(RUN)
print(sensitivity.overview(RUN))  # in a notebook: its last line, without print

# %% Which inputs matter, how far back, how surely? Three answers, one pass over the store.

chosen = ["importance", "effective-memory", "share-positive"]
answers = query.ask(ds, chosen, ci=0.9)
(answers,) = dask.compute(answers)
importance, memory, signs = (answers[name].squeeze(["output_step", "output"]) for name in chosen)
order = importance["feature"].values[np.argsort(-importance["importance"].values)]

print("\nfeature        importance, with 90 % interval   half of |J| within")
for name in order:
    one, lags = importance.sel(feature=name), memory.sel(feature=name)
    interval = f"{float(one['importance_low']):.3f} … {float(one['importance_high']):.3f}"
    half = int(lags["effective_memory"].sel(held=0.5))
    print(f"{name:14} {float(one['importance']):.3f}  ({interval})             {half:3} hours")

first = str(order[0])
positive = float(signs["share_positive"].sel(feature=first, lag=0))
print(f"\nA rise of {first} at lag 0 raises the output in {positive:.0%} of windows")

# %% Under which conditions? Groups by the calendar, by an input, or by anything known along time.

by_season = query.importance(ds, by="season").squeeze().compute()
print("\nimportance by season")
print(by_season["importance"].sel(feature=order[:4]).to_pandas().round(3))

wet_less_dry = query.difference(
    ds, "mean-abs", ("> 1", "≤ 0.1"), by={"rain": [0.1, 1.0]}, features=first, lags="0:5", ci=0.9
)
ends = ["mean_abs_difference", "mean_abs_difference_low", "mean_abs_difference_high"]
print(f"\nmean |J| of {first} where it rains (more than 1 mm in the last hour) less where it is dry, by lag")
print(wet_less_dry.squeeze().compute()[ends].to_dataframe()[ends].round(4))

# %% Which moments? The windows that stand out, at least three days apart, with what went in.

moments = query.top(ds, 5, scaled=True, separation="3D")
print("\nlargest derivatives")
print(moments[["peak"]].to_dataframe()[["time", "at_feature", "at_lag", "peak"]].to_string(index=False))

# %% A question of one's own. Derivatives are an array like any other: Dask computes what xarray writes down.

derivatives = ds["jacobian"].sel(feature=first).squeeze(["output_step", "output"])
night = ds["time"].dt.hour.isin([22, 23, 0, 1, 2, 3])
own = xr.Dataset({"night": derivatives.where(night).mean("time"), "day": derivatives.where(~night).mean("time")})
print(f"\nmean J of {first}, by night and by day, at the newest lags")
print(own.compute().sel(lag=[3, 2, 1, 0])[["night", "day"]].to_dataframe()[["night", "day"]].round(4))

# %% Pictures, of several questions in one pass. In a notebook `plots.show(ds, "heatmap")` is enough.

kinds = ["lag-profile", "heatmap", "month-lag"]
(drawn,) = dask.compute(plots.wanted(ds, kinds))
for kind in kinds:
    plots.save(plots.draw(drawn[kind], kind), f"{kind}.svg")
    print(f"drawn: {kind}.svg")
