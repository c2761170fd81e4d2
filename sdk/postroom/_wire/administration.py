"""What the broker's administration and history routes take and answer (docs/contract/accept.md#accept-4).

A request is a struct that refuses unknown fields; a list comes as one object with one field, so that it can grow.
A member's token implies its mesh: `mesh` may then be left out of a query, and naming another one is a 403.
Times are UTC. A `broker_message_id` is a ULID written as a UUID: the same text in Postgres, HTTP and JetStream.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

from postroom._wire.message import DestinationKind, Priority
from postroom._wire.moment import Moment, check_moments
from postroom._wire.names import MESH, OPERATOR, QUEUE, SNAKE, URL, WORD

Role = Literal["member", "admin"]
OperatorRole = Literal["look", "repair", "administer"]  # each may do what the one before may
CallerRole = Literal["member", "look", "repair", "administer"]

MAX_PAGE = 1000  # messages in one page of the history
MAX_URL = 2048  # characters in the address of a webhook

Slug = Annotated[str, msgspec.Meta(pattern=MESH.schema, description="a mesh, in snake_case; not `cmd`")]
OperatorName = Annotated[str, msgspec.Meta(pattern=OPERATOR.schema, description="an operator; not `administrator`")]
MemberName = Annotated[str, msgspec.Meta(pattern=WORD.schema, description="a member of a mesh")]
TopicName = Annotated[str, msgspec.Meta(pattern=SNAKE.schema, description="a topic, in snake_case")]
QueueName = Annotated[str, msgspec.Meta(pattern=QUEUE.schema, description="a queue: one to four words joined by dots")]


class CreateMesh(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/meshes`; for callers that may administer every mesh."""

    slug: Slug


class Mesh(msgspec.Struct, kw_only=True):
    """A tenant: members, topics, queues and messages live in exactly one."""

    slug: str
    created_at: datetime


class MeshList(msgspec.Struct, kw_only=True):
    """The body of `GET /v1/meshes`, by slug."""

    meshes: list[Mesh]


class CreateMember(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/members`; an `admin` administers its own mesh."""

    mesh: Slug
    name: MemberName
    role: Role = "member"


class Member(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An identity in a mesh. A revoked member keeps its name forever, and its token is refused."""

    mesh: str
    name: str
    role: Role
    created_at: datetime
    revoked_at: datetime | None = None


class MemberToken(msgspec.Struct, kw_only=True):
    """The answer to creating a member or rotating its token: the only time that the token is shown."""

    mesh: str
    name: str
    role: Role
    token: str


class MemberList(msgspec.Struct, kw_only=True):
    """The body of `GET /v1/members`, by name, the revoked ones included."""

    members: list[Member]


class CreateOperator(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of `POST /v1/operators`; without a `mesh`, an operator of every mesh."""

    name: OperatorName
    role: OperatorRole
    mesh: Slug | None = None


class Operator(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An operator of a `mesh`, or without one of every mesh. A revoked one keeps its name, and its token is refused."""

    name: str
    role: OperatorRole
    created_at: datetime
    mesh: str | None = None
    revoked_at: datetime | None = None


class OperatorToken(msgspec.Struct, kw_only=True):
    """The answer to creating an operator or rotating its token: the only time that the token is shown."""

    name: str
    role: OperatorRole
    mesh: str | None
    token: str


class OperatorList(msgspec.Struct, kw_only=True):
    """The body of `GET /v1/operators`, by name, the revoked ones included."""

    operators: list[Operator]


class CreateTopic(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/topics`."""

    mesh: Slug
    name: TopicName


class Topic(msgspec.Struct, kw_only=True):
    """A topic and how many members are subscribed to it."""

    mesh: str
    name: str
    created_at: datetime
    subscribers: int


class TopicList(msgspec.Struct, kw_only=True):
    """The body of `GET /v1/topics`, by name."""

    topics: list[Topic]


class Subscribe(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/topics/{mesh}/{name}/subscriptions`; without `member`, the caller subscribes itself."""

    member: MemberName | None = None


class Subscription(msgspec.Struct, kw_only=True):
    """A member's subscription: it receives the messages of the topic, and may post to it."""

    mesh: str
    topic: str
    member: str
    created_at: datetime


class SubscriptionList(msgspec.Struct, kw_only=True):
    """The body of `GET /v1/topics/{mesh}/{name}/subscriptions`, by member."""

    subscriptions: list[Subscription]


class CreateWebhook(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/topics/{mesh}/{name}/webhooks`."""

    url: Annotated[
        str,
        msgspec.Meta(
            max_length=MAX_URL,
            pattern=URL.schema,
            description="where the topic's messages are posted to: http or https, a public address, no credentials",
        ),
    ]


class Webhook(msgspec.Struct, kw_only=True):
    """An address that the messages of a topic are posted to, those accepted after `created_at`."""

    id: str
    mesh: str
    topic: str
    url: str
    created_at: datetime


class NewWebhook(Webhook, kw_only=True):
    """The answer to registering a webhook: the only time that the secret, which signs its requests, is shown."""

    secret: str


class WebhookList(msgspec.Struct, kw_only=True):
    """The body of `GET /v1/topics/{mesh}/{name}/webhooks`, the oldest first."""

    webhooks: list[Webhook]


class CreateQueue(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/queues`."""

    mesh: Slug
    name: QueueName


class Queue(msgspec.Struct, kw_only=True):
    """A queue: each of its messages is for exactly one worker."""

    mesh: str
    name: str
    created_at: datetime


class QueueList(msgspec.Struct, kw_only=True):
    """The body of `GET /v1/queues`, by name."""

    queues: list[Queue]


class WhoAmI(msgspec.Struct, kw_only=True):
    """The body of `GET /v1/whoami`: the owner of the token, as the operator log names it, and what it may do.

    A member that is an `admin` may `administer` its mesh. A caller with no `mesh` has that role in every mesh.
    """

    actor: str
    role: CallerRole
    mesh: str | None


class MeshQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The query of a list: the mesh; a member's token implies its own."""

    mesh: str | None = None


class RotateQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The query of a new token: whether the old one stays valid until it is retired."""

    keep_old: bool = False


HistoryId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class HistoryQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The query of `GET /v1/history`: messages after a `history_id`, oldest first, to one destination if given.

    `incarnation` is that of the previous page: if the database was restored since, the answer is a 410.
    """

    mesh: str | None = None
    after: HistoryId = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)] = 100
    destination: str | None = None
    incarnation: str | None = None


class MessagesQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The query of `GET /v1/messages`: of a mesh the latest messages first; what is not set matches all.

    `since` and `until` are when the broker accepted them, the first included; `cursor` is the `next_cursor` of the
    page before.
    """

    mesh: str | None = None
    sender: str | None = None
    destination: str | None = None
    since: Moment | None = None
    until: Moment | None = None
    cursor: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)] = 50

    def __post_init__(self) -> None:
        check_moments(since=self.since, until=self.until)


class MessageLine(msgspec.Struct, kw_only=True, frozen=True):
    """A committed message as a list shows it: never a body."""

    history_id: int
    broker_message_id: str
    client_message_id: str
    sender: str
    to: str
    accepted_at: datetime


class MessageLines(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Messages, the latest first. A page may have fewer than requested, even none, and still have a next one."""

    messages: list[MessageLine]
    next_cursor: str | None = None


class HistoryMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A committed message as its readers see it; `body` if it was sent as text, otherwise `body_base64`."""

    history_id: int
    broker_message_id: str
    client_message_id: str
    mesh: str
    sender: str
    to: str
    destination_kind: DestinationKind
    accepted_at: datetime
    request_fingerprint: str  # 64 hex digits
    priority: Priority
    body: str | None = None
    body_base64: str | None = None
    meta: dict[str, Any] | None = None
    reply_to: str | None = None
    traceparent: str | None = None


class HistoryPage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A page of the history.

    `next_after` is the `after` of the next page, and is absent at the end of what has committed so far. A page may have
    fewer messages than requested, even none, and still have a next one: the broker searches a limited part of the
    history for what the caller may see. `incarnation` names the database that it was read from. A reader whose `after`
    was lower than `deleted_to` may have missed what retention has deleted in between.
    """

    messages: list[HistoryMessage]
    next_after: int | None = None
    incarnation: str | None = None
    deleted_to: int | None = None


class BrokerHealth(msgspec.Struct, kw_only=True):
    """The body of `GET /health` and `GET /ready`; `reasons` say why it is not `ok`, one sentence each."""

    status: Literal["ok", "degraded", "unavailable"]
    reasons: list[str]
