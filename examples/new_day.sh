#!/usr/bin/env bash
# A new day's log into a running service: prepare, train, export what changed, and let `turbogr serve LIVE` take it over.
#
#     examples/new_day.sh LOG STORE RUN LIVE NEW_STORE NEW_RUN [options of turbogr train, e.g. --set train.epochs=2]
#
# LOG is the log up to and including the new day, in a format that `turbogr prepare` reads (its ending says which).
# STORE and RUN are yesterday's, LIVE is the export that is served. Rows of known users and items stay, so what did not
# change is not written again. A step that was done is not repeated when the script is started again.
set -euo pipefail

[ $# -ge 6 ] || { sed -n 's/^# \{0,1\}//p' "$0" >&2; exit 2; }
log=$1 store=$2 run=$3 live=$4 new_store=$5 new_run=$6
shift 6

case $log in
    *.parquet) format=parquet ;;
    *) format=csv ;;
esac
[ -d "$new_store" ] || turbogr prepare "$format" "$log" --out "$new_store" --extend "$store"
turbogr train "$run/config.yaml" --data "$new_store" --out "$new_run" --init-from "$run" --resume "$@"

# The delta can be copied to the machines that serve; here it is applied in place. LIVE is replaced as a whole.
turbogr export "$new_run" --since "$live" --out "$live.delta"
turbogr export "$live.delta" --apply --since "$live" --out "$live"
rm -r "$live.delta"
