-- The role may end an autovacuum that is in the way of dropping a database of its own.
create role postroom login createdb;
grant pg_signal_backend to postroom;

create database postroom owner postroom;
