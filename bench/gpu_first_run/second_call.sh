#!/usr/bin/env bash
# The second call on the same machine, 230 s: speed, or what failed in the first again, slowly.
. bench/gpu_first_run/setup.sh
read -r word sections <"$STATE/failed"
if [ "$word" = failed: ]; then
  for section in $(cut -d' ' -f1-2 <<<"${sections:-env}"); do  # there is time for two
    CUDA_LAUNCH_BLOCKING=1 run tandem.bench.gpu_first_run --only "$section" --budget 60 \
      --output "$OUT/again_$section.json" "$@"
  done
  run tandem.bench.gpu_first_run --only sanitize --budget 100 --output "$OUT/sanitize.json" "$@"
else
  run tandem.bench.kernels --only ceilings prefill decode prompts --budget 95 \
    --output "$OUT/kernels.json" "$@"
  run tandem.bench.engine --only ceilings decode prefill quantized --once --budget 120 \
    --output "$OUT/engine.json" "$@"
fi
exit 0
