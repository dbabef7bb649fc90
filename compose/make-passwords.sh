#!/bin/sh
# Write the passwords of this stack's NATS: all of them for NATS, and for each kind of service its own only.
#
#   make-passwords.sh [FOLDER]     FOLDER/nats/passwords.conf, FOLDER/gateway/nats-password, ...
#
# A password is the one given (HEADRACE_NATS_PASSWORD_GATEWAY, ...), else the one there, else a new one.
set -eu
umask 077
cd "${1:-/run/headrace}"
conf=
for kind in gateway scheduler worker observer; do
    name=$(printf '%s' "$kind" | tr '[:lower:]' '[:upper:]')
    eval "password=\${HEADRACE_NATS_PASSWORD_$name:-}"
    if [ -z "$password" ] && [ -s "$kind/nats-password" ]; then
        password=$(cat "$kind/nats-password")
    fi
    if [ -z "$password" ]; then
        password=$(python -c 'import secrets; print(secrets.token_urlsafe(24))')
    fi
    case $password in
    *[!A-Za-z0-9_-]*)
        echo "HEADRACE_NATS_PASSWORD_$name: only letters, digits, _ and - are taken" >&2
        exit 2
        ;;
    esac
    conf="$conf${name}_PASSWORD: \"$password\"
"
    eval "${kind}_password=\$password"
done
mkdir -p nats gateway scheduler worker observer
for kind in gateway scheduler worker observer; do
    eval "password=\$${kind}_password"
    printf '%s\n' "$password" >"$kind/nats-password.new"
    mv "$kind/nats-password.new" "$kind/nats-password"
done
printf '%s' "$conf" >nats/passwords.conf.new
mv nats/passwords.conf.new nats/passwords.conf
