#!/bin/bash
# Written by rlflow: grpo, placement fsdp, on 2 hosts.
# 2 hosts of 1 h100 device each
# 3 cores a host: 1 a device, 2 for the controller and functions without a model
# 2.0 GB of memory a host: 67.1 MB that the plan counts, 1.5 GB for processes, a fifth of all for Ray's objects
# 250.0 GB is the share of its server
# HF_TOKEN: passed by name, written nowhere
# Over the connection alone: HF_TOKEN, RAY_AUTH_TOKEN.
# $address stands for what one answers to: echo $(printf '%s\n' $(hostname --ip-address) $(hostname --all-ip-addresses) | grep -v -e '^127\.' -e : | head -n 1)

# Ray on one, its head
ssh -o BatchMode=yes one bash -s <<'END'
{
set -euo pipefail
source /env/bin/activate
export RAY_USAGE_STATS_ENABLED=0
export RAY_worker_niceness=5
command -v rlflow > /dev/null || { echo "no rlflow on $(hostname): see --setup" >&2; exit 127; }
cd /shared/mine.launch/code
export RAY_AUTH_MODE=token
ray start --block --head --node-ip-address=$address --port=6379 --include-dashboard=false --num-cpus=1 --num-gpus=1 --object-store-memory=50000000000 < /dev/null > /shared/mine.launch/ray-0.log 2>&1 &
started=$!
stop() { kill -TERM "$started" 2> /dev/null || true; }
{ told=; while read -r _; do told=1; stop; done; [ -n "$told" ] || stop; } <&0 &
watching=$!
code=0
wait "$started" || code=$?
kill "$watching" 2> /dev/null || true
exit "$code"
}
END

# Ray on me@two
ssh -o BatchMode=yes me@two bash -s <<'END'
{
set -euo pipefail
source /env/bin/activate
export RAY_USAGE_STATS_ENABLED=0
export RAY_worker_niceness=5
command -v rlflow > /dev/null || { echo "no rlflow on $(hostname): see --setup" >&2; exit 127; }
cd /shared/mine.launch/code
export RAY_AUTH_MODE=token
until (exec 3<> /dev/tcp/$address/6379) 2> /dev/null; do sleep 1; done
ray start --block --address=$address:6379 --num-cpus=1 --num-gpus=1 --object-store-memory=50000000000 < /dev/null > /shared/mine.launch/ray-1.log 2>&1 &
started=$!
stop() { kill -TERM "$started" 2> /dev/null || true; }
{ told=; while read -r _; do told=1; stop; done; [ -n "$told" ] || stop; } <&0 &
watching=$!
code=0
wait "$started" || code=$?
kill "$watching" 2> /dev/null || true
exit "$code"
}
END

# the run, on one
ssh -o BatchMode=yes one bash -s <<'END'
{
set -euo pipefail
source /env/bin/activate
export RAY_USAGE_STATS_ENABLED=0
export RAY_worker_niceness=5
command -v rlflow > /dev/null || { echo "no rlflow on $(hostname): see --setup" >&2; exit 127; }
cd /shared/mine.launch/code
export RAY_AUTH_MODE=token
if [ -e /shared/mine/run.json ]; then
  way=(--resume /shared/mine)
else
  way=(--run-dir /shared/mine)
fi
# The line that continues the run is that of a launch: this cluster ends with it.
export RLFLOW_LAUNCHED='launch pipelines/grpo_arithmetic.py --placement fsdp --devices h100:2 --hosts 2 --setup '"'"'source /env/bin/activate'"'"' --env HF_TOKEN --ssh one,me@two'
rlflow run /shared/mine.launch/code/pipelines/grpo_arithmetic.py --placement fsdp --devices h100:2 --threads 1 --backend ray --address $address:6379 --wait 600 "${way[@]}" < /dev/null &
started=$!
stop() { kill -TERM "$started" 2> /dev/null || true; }
{ told=; while read -r _; do told=1; stop; done; [ -n "$told" ] || stop; } <&0 &
watching=$!
code=0
wait "$started" || code=$?
kill "$watching" 2> /dev/null || true
exit "$code"
}
END
