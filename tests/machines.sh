#!/usr/bin/env bash
# The tests of what computes, on machines unlike this one: a copy of the project in a path with a space, files in another
# order, another processor's instructions and number of threads, another user, time zone and language, no shared data.
#   bash tests/machines.sh PYTHON "SETTINGS" "FOLDERS"
# SETTINGS: plain (no vector instructions, one thread), avx2 (two threads). FOLDERS: of tests/, such as "losses metrics".
set -euo pipefail
python=$(realpath --no-symlinks "$1") settings=$2 folders=$3
cd "$(dirname "$0")/.."
scratch=$(mktemp --directory)
trap 'rm -rf "$scratch"' EXIT
clone="$scratch/a folder/hf_calib"
mkdir --parents "$clone"
git ls-files -z --cached --others --exclude-standard | tar --create --null --ignore-failed-read --files-from=- \
    | tar --extract --directory="$clone"

# Root may write everywhere, so its tests are also run by a user who may not.
as_user=()
if [ "$(id --user)" = 0 ]; then
  ordinary=(unshare --user --map-user=1000 --map-group=1000)
  if "${ordinary[@]}" true 2>/dev/null; then as_user=("${ordinary[@]}"); else echo "no other user here: root it is"; fi
fi

paths=()
for folder in $folders; do paths+=("tests/$folder"); done
for setting in $settings; do
  echo "== $setting: $folders"
  case $setting in
    plain) variables=(ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1 TZ=Pacific/Auckland LC_ALL=C HF_CALIB_TESTS_ORDER=1) ;;
    avx2) variables=(ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=2 TZ=America/St_Johns LC_ALL=C.UTF-8 HF_CALIB_TESTS_ORDER=2) ;;
    *) echo "expected plain or avx2, got $setting" >&2; exit 2 ;;
  esac
  (cd "$clone" && env PYTHONPATH="$clone" HF_CALIB_SHARED="$scratch/nothing" "${variables[@]}" \
      ${as_user[@]+"${as_user[@]}"} "$python" -m pytest -q "${paths[@]}")
done
