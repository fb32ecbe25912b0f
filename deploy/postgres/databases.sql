-- DATABASE_PASSWORD=... psql -v ON_ERROR_STOP=1 -f databases.sql    (as the user postgres)
-- One role and one database a home, for Dagster and the control state.
\getenv password DATABASE_PASSWORD
CREATE ROLE vlm_assets LOGIN PASSWORD :'password' NOSUPERUSER NOCREATEDB NOCREATEROLE CONNECTION LIMIT 280;
CREATE DATABASE vlm_assets OWNER vlm_assets;
REVOKE ALL ON DATABASE vlm_assets FROM PUBLIC;
