#!/bin/sh
# Write the token of this stack's NATS, for NATS and for its clients: the one given, else the one there, else a new one.
set -eu
umask 077
cd "${1:-/run/headrace}"
token=${HEADRACE_NATS_TOKEN:-}
if [ -z "$token" ] && [ -s nats-token ]; then
    token=$(cat nats-token)
fi
if [ -z "$token" ]; then
    token=$(python -c 'import secrets; print(secrets.token_urlsafe(24))')
fi
case $token in
*[!A-Za-z0-9_-]*)
    echo "HEADRACE_NATS_TOKEN: only letters, digits, _ and - are taken" >&2
    exit 2
    ;;
esac
printf '%s\n' "$token" >nats-token.new
printf 'authorization { token: "%s" }\n' "$token" >nats-auth.conf.new
mv nats-token.new nats-token
mv nats-auth.conf.new nats-auth.conf
