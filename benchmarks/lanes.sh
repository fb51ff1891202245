#!/bin/bash
# Several trainings at once on one GPU, which shares it well by NVIDIA's multi-process service:
#
#     benchmarks/lanes.sh SECONDS OUTPUT "cifar10 --recipe siammm --validation ..." "cifar10 ..." ...
#
# Each string is the arguments of train_cifar.py. Runs that are not done after SECONDS are stopped; their logs, with the
# kNN accuracy on held-out images ten times on the way, and the records of the others are in OUTPUT.
set -u
limit=$1 output=$2
shift 2
here=$(dirname "$0")
mkdir -p "$output"
# What is started here ends here, so that a run alone on the GPU comes after it as anywhere else.
if ! pgrep -f nvidia-cuda-mps-control > /dev/null && nvidia-cuda-mps-control -d; then
    trap 'echo quit | nvidia-cuda-mps-control' EXIT
fi
number=0
for arguments in "$@"; do
    number=$((number + 1))
    (
        begun=$SECONDS
        # shellcheck disable=SC2086 - they are several words
        timeout "$limit" "${PYTHON:-python3}" -u "$here/train_cifar.py" $arguments --output "$output" > "$output/$number.log" 2>&1
        echo "ended with $? after $((SECONDS - begun)) s: $arguments" >> "$output/$number.log"
    ) &
done
wait
for log in "$output"/*.log; do
    echo "== $log"
    grep "kNN so far" "$log" | tail -n 1
    tail -n 2 "$log"
done
