"""What a run will cost, before anyone pays for it: time, memory, machines and disk.

`work` counts what there is to compute, `measurements.json` says how long each unit of it took here,
`model` multiplies the two, `machines` adds what several processes exchange, `advice` chooses how to
run, and `commands` writes down what to type. `benchmarks/scale/costs.py` measures and fits.
"""
