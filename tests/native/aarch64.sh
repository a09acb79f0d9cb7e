#!/usr/bin/env bash
# The core on 64-bit Arm, under QEMU: its native tests, and the bits of every kernel and draw, which must be those of this
# machine at each of its levels, also where the calling thread takes subnormal numbers for zeros. Some minutes.
#   Needs cmake, a C++ compiler, and Debian's packages g++-aarch64-linux-gnu and qemu-user-static.
set -euo pipefail
cd "$(dirname "$0")/../.."
for needed in cmake c++ aarch64-linux-gnu-g++ qemu-aarch64-static; do
  command -v "$needed" > /dev/null && continue
  echo "aarch64.sh needs $needed; on Debian: apt-get install cmake g++ g++-aarch64-linux-gnu qemu-user-static" >&2
  exit 1
done

built=build/native jobs=$(nproc)
cmake -S tests/native -B $built/plain -DFEDCORE_CORE_OF= > /dev/null  # compiled from the sources as they are
cmake --build $built/plain --parallel "$jobs" --target bits > /dev/null
cmake -S tests/native -B $built/aarch64 -DCMAKE_TOOLCHAIN_FILE="$PWD/tests/native/aarch64.cmake" > /dev/null
cmake --build $built/aarch64 --parallel "$jobs" > /dev/null
ctest --test-dir $built/aarch64 --output-on-failure --no-tests=error

differing=0
compare() {  # NAME COMMAND...: the bits that the command prints, against the first that were printed
  local name=$1 status=0
  shift
  "$@" > "$built/bits.$name" || status=$?
  if [ $status = 77 ]; then
    echo "$name: this machine has not that level"
    return
  fi
  [ $status = 0 ] || { echo "$name: exit status $status"; exit 1; }
  [ -n "${first:-}" ] || first=$name
  echo "$name: $(grep -vc '^n = ' "$built/bits.$name") results, $(cksum < "$built/bits.$name")"
  cmp -s "$built/bits.$first" "$built/bits.$name" && return
  differing=1
  diff "$built/bits.$first" "$built/bits.$name" | grep '^[<>]' | head
}
for mode in plain flush; do
  for level in baseline avx2 avx512; do
    compare "$(uname -m)-$level-$mode" env FEDCORE_ISA=$level $built/plain/bits $mode
  done
  compare "emulated-aarch64-$mode" qemu-aarch64-static -L /usr/aarch64-linux-gnu $built/aarch64/bits $mode
done
[ $differing = 0 ] && echo "the same bits everywhere"
exit $differing
