#!/usr/bin/env bash
# One run on nodes allocated by Slurm: a Ray cluster for this job alone, and `cory train` in it.
#
#   sbatch docs/examples/slurm.sh imdb-gpt2 --out /shared/runs/one num_runners=4 num_learners=2
#
# Arguments after the script are passed to `cory train`; --out must be a folder that all nodes share, or a URI. Five
# minutes before the time limit, on preemption, and on `scancel --signal=TERM --batch`, the run finishes its update and
# saves it. If the job is submitted again or requeued, the run resumes (--continue).
#SBATCH --job-name=cory
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-task=4
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=cory-%j.log
set -euo pipefail

# Ray requires a token that only this user can read, so no other process on these nodes can use this cluster.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$HOME/.cory-slurm-$SLURM_JOB_ID"
(umask 077 && python -c 'import secrets; print(secrets.token_hex(32), end="")' >"$RAY_AUTH_TOKEN_PATH")

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export RAY_ADDRESS="${nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))"
driver=
trap '[ -z "$driver" ] || kill -TERM "$driver"' TERM
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"; kill $(jobs -p) 2>/dev/null || true' EXIT

join() { # NODE OPTION...
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    --open-mode=append --output="cory-$SLURM_JOB_ID-ray-$1.log" \
    ray start --block --num-cpus="$SLURM_CPUS_PER_TASK" --temp-dir="/tmp/ray-$SLURM_JOB_ID-$1" "${@:2}" &
}
join "${nodes[0]}" --head --node-ip-address="${nodes[0]}" --port="${RAY_ADDRESS##*:}" --include-dashboard=false
until ray health-check --address "$RAY_ADDRESS" 2>/dev/null; do
  jobs -rp | grep -q . || { echo "Ray's head on ${nodes[0]} has ended: see cory-$SLURM_JOB_ID-ray-${nodes[0]}.log" >&2; exit 1; }
  sleep 2
done
for node in "${nodes[@]:1}"; do join "$node" --address="$RAY_ADDRESS"; done

# cory rejects a run that the cluster cannot place, so wait for all nodes first.
python - "${#nodes[@]}" <<'EOF'
import sys, time, ray
ray.init(log_to_driver=False)
end = time.monotonic() + 300
while (here := sum(node["Alive"] for node in ray.nodes())) < int(sys.argv[1]):
    if time.monotonic() > end:
        sys.exit(f"Only {here} of {sys.argv[1]} nodes have joined Ray within five minutes: see cory-*-ray-*.log")
    time.sleep(1)
EOF

cory train "$@" --continue &
driver=$!
code=0
wait "$driver" || code=$?
while kill -0 "$driver" 2>/dev/null; do wait "$driver" || code=$?; done # a signal has ended the first wait
exit "$code"
