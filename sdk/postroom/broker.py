"""`BrokerClient`: administer a broker, and read what it has accepted (docs/contract/accept.md#accept-4).

The token of a member, or of an operator of one mesh, implies that mesh, which may then be omitted. A member with the
role `admin` may do within its own mesh what an administering operator may do.
"""

import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from postroom._wire import administration as api
from postroom._wire.accept import AcceptAnswer, AcceptedQuery, AcceptResponse, Features, SentMessage
from postroom._wire.arguments import check_seconds, check_verb, path_of, segment
from postroom._wire.connections import Pool, url_dial
from postroom._wire.dead_letters import DEAD_LETTERS, LetterCauses
from postroom._wire.jobs import JOBS, JobMessage, MessagePage, StartedJob, StartJob
from postroom._wire.nouns import C, Change, F, L, Noun, P, Q, Result, T, W
from postroom._wire.trace import Story
from postroom._wire.transport import Calls, Peer, Transport

__all__ = ["BrokerClient"]


class BrokerClient(Calls):
    """A client of the broker at `url`, with a bearer `token`.

    One exchange may take `timeout` seconds (more than 0); requests that may be repeated are, for `patience` seconds (0:
    one try). Raises `InvalidMessage` for other numbers.
    `ca_file` holds the certificates to trust instead of the system's. Use it in one event loop.
    """

    def __init__(
        self, url: str, token: str, *, timeout: float = 10.0, patience: float = 30.0, ca_file: Path | None = None
    ) -> None:
        check_seconds(timeout, patience)
        peer = Peer("broker", url, "start one (`postroom up`, `postroom broker run`), or set POSTROOM_BROKER_URL")
        dial = url_dial(url, ssl.create_default_context(cafile=ca_file) if ca_file else None)
        headers = {"User-Agent": "postroom", "Authorization": f"Bearer {token}"}
        super().__init__(Transport(Pool(dial), url, peer, timeout, headers), patience)

    async def health(self) -> api.BrokerHealth:
        """Return the broker's health: ok, or `degraded` with the reasons."""
        return await self._read("/health", api.BrokerHealth)

    async def features(self) -> Features:
        """Return what the broker supports, and the member that the token belongs to."""
        return await self._read("/v1/features", Features)

    async def whoami(self) -> api.WhoAmI:
        """Return the holder of the token, as named in the log of operators, and what it may do in which mesh."""
        return await self._read("/v1/whoami", api.WhoAmI)

    async def accepted(self, messages: Sequence[SentMessage]) -> list[AcceptAnswer]:
        """Ask which of the member's own messages the broker accepted: an answer per message (at most 1000), in order.

        `status` is 200 with the broker's ids, 404 (`not_accepted`), or 409 for an id that another message has. It
        changes nothing and costs no unit of a rate limit.
        """
        query = AcceptedQuery(messages=list(messages))
        return (await self._read("/v1/accepted", AcceptResponse, body=query)).answers

    async def create_mesh(self, slug: str) -> api.Mesh:
        """Create a mesh; raises `Conflict` where there is one of that name."""
        return await self._change("POST", "/v1/meshes", api.Mesh, api.CreateMesh(slug=slug))

    async def list_meshes(self) -> list[api.Mesh]:
        """Return every mesh, by slug."""
        return (await self._read("/v1/meshes", api.MeshList)).meshes

    async def delete_mesh(self, slug: str) -> None:
        """Delete a mesh; raises `Conflict` where it has messages."""
        await self._delete("meshes", slug)

    async def create_member(self, mesh: str, name: str, role: api.Role = "member") -> api.MemberToken:
        """Create a member and return its token, which is shown only once."""
        return await self._change(
            "POST", "/v1/members", api.MemberToken, api.CreateMember(mesh=mesh, name=name, role=role)
        )

    async def list_members(self, mesh: str | None = None) -> list[api.Member]:
        """Return the members of a mesh, by name, the revoked ones included."""
        return (await self._read("/v1/members", api.MemberList, query=api.MeshQuery(mesh=mesh))).members

    async def revoke_member(self, mesh: str, name: str) -> None:
        """End a member's access permanently."""
        await self._delete("members", mesh, name)

    async def rotate_member_token(self, mesh: str, name: str, *, keep_old: bool = False) -> api.MemberToken:
        """Give a member a new token, which is shown only once; the old one is refused from then on.

        With `keep_old` it stays valid until `retire_member_token`; raises `Conflict` where there are two already.
        """
        path = path_of("members", mesh, name, "token") + ("?keep_old=true" if keep_old else "")
        return await self._change("POST", path, api.MemberToken)

    async def retire_member_token(self, mesh: str, name: str) -> None:
        """End the old one of a member's two tokens; raises `NotFound` where there is only one."""
        await self._delete("members", mesh, name, "old_token")

    async def create_operator(self, name: str, role: api.OperatorRole, mesh: str | None = None) -> api.OperatorToken:
        """Create an operator of a mesh, or of every mesh, and return its token, which is shown only once."""
        wanted = api.CreateOperator(name=name, role=role, mesh=mesh)
        return await self._change("POST", "/v1/operators", api.OperatorToken, wanted)

    async def list_operators(self) -> list[api.Operator]:
        """Return the operators, by name, the revoked ones included."""
        return (await self._read("/v1/operators", api.OperatorList)).operators

    async def revoke_operator(self, name: str) -> None:
        """End an operator's access permanently."""
        await self._delete("operators", name)

    async def rotate_operator_token(self, name: str) -> api.OperatorToken:
        """Give an operator a new token, which is shown only once; the old one is refused from then on."""
        return await self._change("POST", path_of("operators", name, "token"), api.OperatorToken)

    async def create_topic(self, mesh: str, name: str) -> api.Topic:
        """Create a topic; raises `Conflict` where there is one of that name."""
        return await self._change("POST", "/v1/topics", api.Topic, api.CreateTopic(mesh=mesh, name=name))

    async def list_topics(self, mesh: str | None = None) -> list[api.Topic]:
        """Return the topics of a mesh, by name."""
        return (await self._read("/v1/topics", api.TopicList, query=api.MeshQuery(mesh=mesh))).topics

    async def delete_topic(self, mesh: str, name: str) -> None:
        """Delete a topic."""
        await self._delete("topics", mesh, name)

    async def subscribe(self, mesh: str, topic: str, member: str | None = None) -> api.Subscription:
        """Subscribe a member (default: the token's own) to a topic."""
        path = path_of("topics", mesh, topic, "subscriptions")
        return await self._change("POST", path, api.Subscription, api.Subscribe(member=member))

    async def list_subscriptions(self, mesh: str, topic: str) -> list[api.Subscription]:
        """Return the subscribers of a topic, by member."""
        return (await self._read(path_of("topics", mesh, topic, "subscriptions"), api.SubscriptionList)).subscriptions

    async def unsubscribe(self, mesh: str, topic: str, member: str) -> None:
        """End a member's subscription."""
        await self._delete("topics", mesh, topic, "subscriptions", member)

    async def create_webhook(self, mesh: str, topic: str, url: str) -> api.NewWebhook:
        """Post a topic's messages to `url` from now on; return the secret that signs them, shown only once."""
        path, wanted = path_of("topics", mesh, topic, "webhooks"), api.CreateWebhook(url=url)
        shown = f"`postroom topic webhook list {topic}` shows it if so; remove it before you add it again"
        return await self._change("POST", path, api.NewWebhook, wanted, unsure=shown)

    async def list_webhooks(self, mesh: str, topic: str) -> list[api.Webhook]:
        """Return the webhooks of a topic, the oldest first."""
        return (await self._read(path_of("topics", mesh, topic, "webhooks"), api.WebhookList)).webhooks

    async def delete_webhook(self, mesh: str, topic: str, webhook: str) -> None:
        """Delete a webhook of a topic by its id."""
        await self._delete("topics", mesh, topic, "webhooks", webhook)

    async def create_queue(self, mesh: str, name: str) -> api.Queue:
        """Create a queue; raises `Conflict` where there is one of that name."""
        return await self._change("POST", "/v1/queues", api.Queue, api.CreateQueue(mesh=mesh, name=name))

    async def list_queues(self, mesh: str | None = None) -> list[api.Queue]:
        """Return the queues of a mesh, by name."""
        return (await self._read("/v1/queues", api.QueueList, query=api.MeshQuery(mesh=mesh))).queues

    async def delete_queue(self, mesh: str, name: str) -> None:
        """Delete a queue."""
        await self._delete("queues", mesh, name)

    async def message(self, broker_message_id: str) -> api.HistoryMessage:
        """Return one accepted message; raises `NotFound`."""
        return await self._read(path_of("messages", broker_message_id), api.HistoryMessage)

    async def messages(self, query: api.MessagesQuery) -> api.MessageLines:
        """Return one page of the messages that match `query`, the latest first, without their bodies."""
        return await self._read("/v1/messages", api.MessageLines, query=query)

    async def trace(self, id_: str) -> Story:
        """Return what the broker knows of a message, an event, a dead letter or a job; raises `NotFound`."""
        return await self._read(path_of("trace", id_), Story)

    async def history(self, query: api.HistoryQuery) -> AsyncIterator[api.HistoryMessage]:
        """Yield the accepted messages that match `query`, oldest first, up to what is committed now.

        Raises `Gone` where the broker's database was restored to an earlier state: its `problem.resume_after` is the
        `history_id` up to which the history is the same.
        """
        after: int | None = query.after
        while after is not None:
            query = msgspec.structs.replace(query, after=after)
            page = await self._read("/v1/history", api.HistoryPage, query=query)
            for message in page.messages:
                yield message
            after, query.incarnation = page.next_after, page.incarnation

    async def start_job(self, wanted: StartJob) -> StartedJob:
        """Start a job of a flow, by its names; a start that is repeated under its id starts one job."""
        return await self._repeat("POST", JOBS.path, StartedJob, body=wanted)

    async def explain(self, message: str) -> list[JobMessage]:
        """Return the role of a message for each activity of a job that it concerned; raises `NotFound`."""
        return (await self._read(f"{JOBS.path}/messages/{segment(message)}", MessagePage)).messages

    async def causes(self, mesh: str | None = None) -> LetterCauses:
        """Return why messages of a mesh are dead, the most frequent cause first, with one example of each."""
        return await self._read(f"{DEAD_LETTERS.path}/causes", LetterCauses, query=api.MeshQuery(mesh=mesh))

    # What an operator sees and changes; `noun` is its table, such as `postroom._wire.dead_letters.DEAD_LETTERS`.

    async def list_things(self, noun: Noun[Q, P, W, L, C, F, T], query: Q) -> P:
        """Return one page of the things that `query` selects."""
        return await self._read(noun.path, noun.page, query=query)

    async def inspect(self, noun: Noun[Q, P, W, L, C, F, T], *words: str, query: msgspec.Struct | None = None) -> W:
        """Return one thing, whole, by the words that fill in its `place`; raises `NotFound`."""
        place = iter(words)
        path = "/".join(segment(next(place, "")) if part[0] == "{" else part for part in noun.place.split("/"))
        return await self._read(f"{noun.path}/{path}", noun.whole, query=query)

    async def log(self, noun: Noun[Q, P, W, L, C, F, T], mesh: str | None = None) -> L:
        """Return what operators did to the things of a mesh."""
        return await self._read(f"{noun.path}/log", noun.log, query=api.MeshQuery(mesh=mesh))

    async def counts(self, noun: Noun[Q, P, W, L, C, F, T]) -> C:
        """Return how many of the things wait for an operator, of all meshes."""
        return await self._read(f"{noun.path}/counts", noun.counts)

    async def change(
        self,
        noun: Noun[Q, P, W, L, C, F, T],
        verb: str,
        wanted: F,
        *,
        reason: str,
        mesh: str | None = None,
        dry_run: bool = False,
    ) -> Result[T]:
        """Do a verb to all that `wanted` selects; with `dry_run`, only return to what.

        One request covers some hundred of them; what it did stays done where a later one fails.
        """
        total: Result[T] = Result(dry_run=dry_run, done=[], failed=[])
        async for part in self.changes(noun, verb, wanted, reason=reason, mesh=mesh, dry_run=dry_run):
            total.done += part.done
            total.failed += part.failed
            total.unread = part.unread
        return total

    async def changes(
        self,
        noun: Noun[Q, P, W, L, C, F, T],
        verb: str,
        wanted: F,
        *,
        reason: str,
        mesh: str | None = None,
        dry_run: bool = False,
    ) -> AsyncIterator[Result[T]]:
        """Do the same, and yield what each request did."""
        check_verb(verb, noun.verbs)
        cursor = None
        while True:
            asked = Change(reason=reason, filter=wanted, mesh=mesh, dry_run=dry_run, cursor=cursor)
            part = await self._change("POST", f"{noun.path}/{verb}", noun.result, asked)
            yield part
            cursor = part.next_cursor
            if cursor is None:
                return

    async def _delete(self, *words: str) -> None:
        await self._change("DELETE", path_of(*words), type(None))
