"""The model and its machine: sequences in, tokens out, one step at a time, for both roles.

`architecture`, `weights`, `decoder` and `transformers_models` are models; `schedule` chooses what a
step computes and holds no tensors; `batch`, `step` and `memory` are the step on its device;
`execution` puts them together and `core` drives them. It imports `kernels` and `runtime`. Begin
with `core/engine.py`, then `schedule/scheduler.py` and `execution/model_runner.py`.
"""
