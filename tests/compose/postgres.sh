#!/bin/sh
# What the official image does at its start, as far as docker-compose.yml asks for it.
set -eu
data=/var/lib/postgresql/data
if [ ! -s "$data/PG_VERSION" ]; then
    echo "$POSTGRES_PASSWORD" > /tmp/password
    initdb -D "$data" -U "$POSTGRES_USER" -A scram-sha-256 --pwfile /tmp/password -E UTF8 --no-sync
    echo "host all all all scram-sha-256" >> "$data/pg_hba.conf"
    postgres --single -D "$data" postgres > /dev/null <<SQL
CREATE DATABASE $POSTGRES_DB
SQL
fi
exec postgres -D "$data" -c listen_addresses='*' -k /run/postgresql
