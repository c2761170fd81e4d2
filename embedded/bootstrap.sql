create role postroom login createdb;

create database postroom owner postroom;

