CREATE TABLE orders (
  id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  item text NOT NULL,
  cents integer NOT NULL CHECK (cents > 0),
  payments integer NOT NULL DEFAULT 0
);
