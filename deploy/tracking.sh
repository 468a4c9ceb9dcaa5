#!/bin/sh
# Starts MLflow on PostgreSQL, behind passwords. The passwords are files, and stay out of command lines and addresses.
#
#   PRIVATE    folder with the files database, admin and key (/run/secrets)
#   PGHOST     where PostgreSQL listens (127.0.0.1); PGPORT its port
#   ARTIFACTS  where pictures and models are kept: a folder, or s3://BUCKET/FOLDER (./artifacts)
#   LISTEN     address that is listened at (127.0.0.1)
set -eu
secret() { cat "${PRIVATE:-/run/secrets}/$1"; }
PGPASSWORD=$(secret database)
MLFLOW_AUTH_ADMIN_PASSWORD=$(secret admin)
MLFLOW_FLASK_SERVER_SECRET_KEY=$(secret key)
export PGPASSWORD MLFLOW_AUTH_ADMIN_PASSWORD MLFLOW_FLASK_SERVER_SECRET_KEY
export PGHOST="${PGHOST:-127.0.0.1}" MLFLOW_AUTH_CONFIG_PATH="$(dirname "$0")/basic_auth.ini"
# psycopg2 by name: SQLAlchemy 2.1 takes psycopg for a bare postgresql://
exec mlflow server --app-name basic-auth --host "${LISTEN:-127.0.0.1}" --port 5000 --workers 2 \
    --backend-store-uri postgresql+psycopg2://mlflow@/mlflow --artifacts-destination "${ARTIFACTS:-./artifacts}"
