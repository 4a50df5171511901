#!/usr/bin/env bash
# The first call on a GPU, 430 s: does it work, and is it right? Takes options of the program, as
# --device cpu. Its last line names what failed: second_call.sh reads it on the same machine.
. bench/gpu_first_run/setup.sh
run tandem.bench.gpu_first_run --budget 400 --output "$OUT/first_run.json" "$@"
run tandem.bench.gpu_first_run.verdict "$OUT/first_run.json" | tee "$STATE/failed"
