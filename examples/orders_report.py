# ruff: noqa: T201 - a notebook prints what it finds
"""A Parquet file of orders through Postroom to a handler, and then the history and a report: cell by cell.

    postroom up --detach                                    # and read the `env` file that it names
    python examples/orders_report.py [DIRECTORY]            # or open it as a notebook: cells begin with `# %%`

It needs `pip install 'postroom-server[pipeline]'`. Run it again, and no order is sent or counted twice.
"""

# %% What is where: everything that is made goes into one directory.
from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from pipeline.runner import run_by_name
from postroom.spark.session import prepare_environment

DIRECTORY = Path(sys.argv[1] if len(sys.argv) > 1 else "orders-report").absolute()
DATABASE = os.environ["POSTROOM_DATABASE_URL"]
ORDERS = 500
FRUIT = {"apples": 120, "pears": 180, "plums": 240}  # cents


class Order(msgspec.Struct):
    """What the handler needs of a message."""

    order_id: int
    cents: int


# %% A handler, as any service may have one: it takes the cents of each order once, and remembers on disk.
class Till(BaseHTTPRequestHandler):
    """A file for each order, under its key: a second delivery of one changes nothing."""

    drawer = DIRECTORY / "till"

    def do_POST(self) -> None:
        """Handle one message of the topic `orders`."""
        message = msgspec.json.decode(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            order = msgspec.json.decode(message["payload"]["message"]["body"], type=Order)
        except msgspec.DecodeError:
            self.send_response(422)  # somebody else's message: never
        else:
            (self.drawer / self.headers["Idempotency-Key"]).write_text(str(order.cents))
            self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Be quiet."""


@contextmanager
def handler() -> Iterator[subprocess.Popen[bytes]]:
    """Run the handler, and a consumer that gives it the messages of the topic."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Till)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = DIRECTORY / "till.toml"
    config.write_text(
        'context = "demo"\n[consumer]\nstream = "DEMO_EVENTS"\ndurable = "till"\n'
        'filter_subjects = ["demo.event.orders.>"]\n'
        f'[handler]\nurl = "http://127.0.0.1:{server.server_port}/"\n'
    )
    settings = {
        "POSTROOM_CONSUMER_NATS_URL": os.environ["POSTROOM_NATS_URL"],
        "POSTROOM_CONSUMER_DATABASE_URL": DATABASE,
        "POSTROOM_CONSUMER_LISTEN_PORT": "0",
    }
    command = [sys.executable, "-m", "postroom.worker", "consumer", "--config", str(config)]
    consumer = subprocess.Popen(command, env={**os.environ, **settings}, stderr=subprocess.DEVNULL)  # noqa: S603
    try:
        yield consumer
    finally:
        consumer.terminate()
        consumer.wait()
        server.shutdown()


# %% A Spark session on this machine, and a Parquet file of orders.
Till.drawer.mkdir(parents=True, exist_ok=True)
print(prepare_environment())
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.sql.shuffle.partitions", "2")
    .getOrCreate()
)
chance = random.Random(17)  # noqa: S311 - the same orders each time
rows = [(number, chance.choice(list(FRUIT)), chance.randint(1, 9)) for number in range(ORDERS)]
made = spark.createDataFrame(rows, "order_id LONG, fruit STRING, pieces LONG")
prices = spark.createDataFrame(list(FRUIT.items()), "fruit STRING, price LONG")
made.join(prices, "fruit").select(
    "order_id", "fruit", "pieces", (F.col("pieces") * F.col("price")).alias("cents")
).write.mode("overwrite").parquet(str(DIRECTORY / "orders.parquet"))

# %% Send them: each row becomes one message, whose id follows from the order's.
orders = spark.read.parquet(str(DIRECTORY / "orders.parquet"))
posted = orders.write.format("postroom").option("to", "topic:orders").option("id", "order_id")
posted.option("wait", "accepted").mode("append").save()

# %% Let the handler work until it has all that the history has.
history = spark.read.format("postroom_history").option("database_url", DATABASE).option("mesh", "demo").load()
ours = (
    history.where(F.col("to") == "topic:orders")
    .select(F.from_json("body", "order_id LONG, fruit STRING, pieces LONG, cents LONG").alias("order"))
    .where("order.cents IS NOT NULL")  # leave out what others sent to the topic
)
sent = ours.count()
with handler() as consumer:
    while len(list(Till.drawer.iterdir())) < sent:
        if consumer.poll() is not None:
            sys.exit("the consumer ended: `postroom doctor` says more")
        time.sleep(0.1)
taken = [int(file.read_text()) for file in Till.drawer.iterdir()]
print(f"the history has {sent} orders; the till took {sum(taken) / 100:.2f} for {len(taken)} of them")

# %% What was sold, from the history alone.
sold = ours.groupBy("order.fruit").agg(F.sum("order.pieces").alias("pieces"), F.sum("order.cents").alias("cents"))
sold.orderBy(F.desc("cents")).show()

# %% How long it all took: a table and a picture.
report = run_by_name("delivery-report", [f"database_url={DATABASE}", "mesh=demo", f"output={DIRECTORY}"])
for name, value in report.facts.items():
    print(f"{name}: {value}")
