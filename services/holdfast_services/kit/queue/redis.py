"""A queue in Redis: one stream with one consumer group. Redis 6.2 or newer.

==============================  ========================================================
``holdfast:queue:items``        stream; an entry is waiting until the group delivers it, then
                                claimed (pending); acknowledged ones are deleted from it
``holdfast:queue:known``        hash, item -> id of its entry, or ``delayed``
``holdfast:queue:delayed``      sorted set of "<deliveries> <item>" by when it is due, ms
``holdfast:queue:epoch``        random text, made with the group and lost with it
``holdfast:queue:clock``        when somebody last claimed, ms
==============================  ========================================================

All five are always there: ``known`` and ``delayed`` hold one member that is no item. So a server
that evicts any of them is noticed, and the queue begins anew as if it were restarted. Every change
is one script: it happens whole or not at all, by the clock of Redis. A claim is named by its entry
and the number of that delivery, which grows when another takes it over.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from holdfast.errors import InvalidRequestError, UnavailableError
from holdfast_services.kit.queue import Claim, check_items

SOCKET_S_MAX = 5.0
# A blocked claimer looks this often for what has become due or was left by a dead worker.
BLOCK_S_MAX = 0.5
OFFER_BATCH = 500
# Nothing is due later than that: what seems to be was noted before the clock stepped back.
FAR_MS = 600 * 1000
# Once per object: names of workers that went long ago are forgotten.
WORKER_SILENT_MS_MAX = 24 * 3600 * 1000
# A clock that is further behind the last claim than this has stepped back.
STEP_MS_MIN = 1000
PENDING_PAGE = 500

_GROUP = "workers"
_STREAM = "holdfast:queue:items"
_EPOCH = "holdfast:queue:epoch"
_CLOCK = "holdfast:queue:clock"
_KEYS = (_STREAM, "holdfast:queue:known", "holdfast:queue:delayed", _EPOCH, _CLOCK)

log = logging.getLogger(__name__)

# Without its group or one of its keys the queue is not what it was: begin it anew, whole.
_BEGIN = """
local items, known, delayed, epoch, clock = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local group = 'workers'
if redis.call('EXISTS', items, known, delayed, epoch, clock) < 5 then
  redis.call('DEL', items, known, delayed)
  redis.call('XGROUP', 'CREATE', items, group, '0', 'MKSTREAM')
  redis.call('HSET', known, '', '')
  redis.call('ZADD', delayed, '-inf', '')
  redis.call('SET', clock, 0)
  redis.call('SET', epoch, ARGV[1])
end
local function now_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end
local function add(item, deliveries)
  local id = redis.call('XADD', items, '*', 'item', item, 'deliveries', deliveries)
  redis.call('HSET', known, item, id)
end
local function is_ours(id, delivery)
  local found = redis.call('XPENDING', items, group, id, id, 1)[1]
  return found and found[4] == tonumber(delivery)
end
local function remove(id)
  redis.call('XACK', items, group, id)
  redis.call('XDEL', items, id)
end
"""

_READ_EPOCH = _BEGIN + "return redis.call('GET', epoch)"

_OFFER = f"""{_BEGIN}
local added = 0
for i = 2, #ARGV do
  if redis.call('HSETNX', known, ARGV[i], '') == 1 then
    add(ARGV[i], 0)
    added = added + 1
  end
end
return added
"""

# ARGV: worker, count, lease in ms. Returns {{id, delivery, item, deliveries before}, ...}.
_CLAIM = f"""{_BEGIN}
local worker, count, lease_ms = ARGV[2], tonumber(ARGV[3]), ARGV[4]
local now = now_ms()
if now < redis.call('GET', clock) - {STEP_MS_MIN} then
  -- Claims seem to be of the future, and would stay a dead worker's until then: their leases
  -- begin anew. Who lives beats within them.
  local from = '-'
  while from do
    local left = redis.call('XPENDING', items, group, from, '+', {PENDING_PAGE})
    for _, one in ipairs(left) do
      redis.call('XCLAIM', items, group, one[2], 0, one[1], 'TIME', now, 'JUSTID')
    end
    from = #left == {PENDING_PAGE} and '(' .. left[#left][1] or nil
  end
end
redis.call('SET', clock, now)
local function due(from, to)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', delayed, from, to, 'LIMIT', 0, 100)) do
    local space = string.find(member, ' ', 1, true)
    redis.call('ZREM', delayed, member)
    add(string.sub(member, space + 1), string.sub(member, 1, space - 1))
  end
end
due('(-inf', now)
due(now + {FAR_MS}, '+inf')
local claims = {{}}
for _, left in ipairs(redis.call('XPENDING', items, group, 'IDLE', lease_ms, '-', '+', count)) do
  local entry = redis.call('XCLAIM', items, group, worker, lease_ms, left[1])[1]
  if entry then
    claims[#claims + 1] = {{entry[1], left[4] + 1, entry[2][2], entry[2][4]}}
  end
end
if #claims < count then
  local read = redis.call(
    'XREADGROUP', 'GROUP', group, worker, 'COUNT', count - #claims, 'STREAMS', items, '>')
  for _, entry in ipairs(read and read[1][2] or {{}}) do
    claims[#claims + 1] = {{entry[1], 1, entry[2][2], entry[2][4]}}
  end
end
return claims
"""

# ARGV: worker, then id and delivery of each claim. Returns the places, from 0, of the lost ones.
_HEARTBEAT = f"""{_BEGIN}
local lost = {{}}
for i = 3, #ARGV, 2 do
  if is_ours(ARGV[i], ARGV[i + 1]) then
    redis.call('XCLAIM', items, group, ARGV[2], 0, ARGV[i], 'JUSTID')
  else
    lost[#lost + 1] = (i - 3) / 2
  end
end
return lost
"""

# ARGV: id, delivery, item.
_ACKNOWLEDGE = f"""{_BEGIN}
if is_ours(ARGV[2], ARGV[3]) then
  remove(ARGV[2])
  redis.call('HDEL', known, ARGV[4])
end
"""

# ARGV: id, delivery, item, deliveries, delay in ms.
_RELEASE = f"""{_BEGIN}
if is_ours(ARGV[2], ARGV[3]) then
  remove(ARGV[2])
  if tonumber(ARGV[6]) > 0 then
    redis.call('ZADD', delayed, now_ms() + ARGV[6], ARGV[5] .. ' ' .. ARGV[4])
    redis.call('HSET', known, ARGV[4], 'delayed')
  else
    add(ARGV[4], ARGV[5])
  end
end
"""

_WAITING = f"""{_BEGIN}
local claimed = redis.call('XPENDING', items, group)[1]
return redis.call('XLEN', items) - claimed + redis.call('ZCARD', delayed) - 1
"""

# ARGV: prefix.
_COUNT = f"""{_BEGIN}
local count = 0
for _, item in ipairs(redis.call('HKEYS', known)) do
  if item ~= '' and string.sub(item, 1, #ARGV[2]) == ARGV[2] then count = count + 1 end
end
return count
"""

_FORGET_WORKERS = f"""{_BEGIN}
for _, row in ipairs(redis.call('XINFO', 'CONSUMERS', items, group)) do
  local facts = {{}}
  for i = 1, #row, 2 do facts[row[i]] = row[i + 1] end
  if facts.pending == 0 and facts.idle > tonumber(ARGV[2]) then
    redis.call('XGROUP', 'DELCONSUMER', items, group, facts.name)
  end
end
"""


class RedisQueue:
    """The promises of ``Queue`` over one Redis database, which may hold other keys too."""

    def __init__(self, url: str, *, lease_s: float) -> None:
        try:
            self._redis = redis.Redis.from_url(
                url,
                decode_responses=True,
                protocol=2,
                socket_timeout=SOCKET_S_MAX,
                socket_connect_timeout=SOCKET_S_MAX,
                # Once more at once: a pooled connection may have died with the last server.
                retry=Retry(NoBackoff(), 1),
            )
        except (ValueError, TypeError) as cause:
            raise InvalidRequestError(f"not the URL of a Redis server: {cause}") from cause
        self._lease_ms = max(1, round(lease_s * 1000))
        self._has_forgotten = False
        self._has_warned = False

    def epoch(self) -> str:
        """As in ``Queue``; another too when Redis was restarted, with whatever it then loaded."""
        with _meaning():
            run: Any = self._redis.info("server")
            memory: Any = {} if self._has_warned else self._redis.info("memory")
        if memory.get("maxmemory") and memory["maxmemory_policy"].startswith("allkeys"):
            log.warning(
                "this Redis evicts keys (maxmemory-policy %s): the queue will be lost and filled "
                "again; use noeviction or volatile-*", memory["maxmemory_policy"],
            )  # fmt: skip
        self._has_warned = True
        return f"{run['run_id']}:{self._run(_READ_EPOCH)}"

    def offer(self, items: Sequence[str]) -> int:
        """As in ``Queue``."""
        check_items(items)
        starts = range(0, len(items), OFFER_BATCH)
        return sum(int(self._run(_OFFER, *items[i : i + OFFER_BATCH])) for i in starts)

    def claim(self, worker: str, *, count_max: int, wait_s: float) -> Sequence[Claim]:
        """As in ``Queue``."""
        deadline_s = time.monotonic() + wait_s
        if not self._has_forgotten:
            self._run(_FORGET_WORKERS, WORKER_SILENT_MS_MAX)
            self._has_forgotten = True
        while True:
            found = self._run(_CLAIM, worker, count_max, self._lease_ms)
            left_s = deadline_s - time.monotonic()
            if not found and left_s > 0:
                found = self._read(worker, count_max, wait_s=min(left_s, BLOCK_S_MAX))
            if found or left_s <= 0:
                return [_claim(*row) for row in found]

    def heartbeat(self, worker: str, claims: Sequence[Claim]) -> Sequence[Claim]:
        """As in ``Queue``."""
        names = [part for claim in claims for part in claim.token.split("/")]
        return [claims[int(place)] for place in self._run(_HEARTBEAT, worker, *names)]

    def acknowledge(self, claim: Claim) -> None:
        """As in ``Queue``."""
        self._run(_ACKNOWLEDGE, *claim.token.split("/"), claim.item)

    def release(self, claim: Claim, *, delay_s: float) -> None:
        """As in ``Queue``."""
        name = claim.token.split("/")
        self._run(
            _RELEASE, *name, claim.item, claim.deliveries, min(FAR_MS - 1, round(delay_s * 1000))
        )

    def waiting_count(self) -> int:
        """As in ``Queue``."""
        return int(self._run(_WAITING))

    def items_count(self, prefix: str = "") -> int:
        """As in ``Queue``."""
        return int(self._run(_COUNT, prefix))

    def close(self) -> None:
        """As in ``Queue``."""
        self._redis.close()

    def _run(self, script: str, *arguments: str | int) -> Any:
        """Run ``script`` on a queue that is there; the first argument is an epoch to begin with."""
        call = self._redis.register_script(script)
        argv = (secrets.token_hex(8), *arguments)
        with _meaning():
            try:
                return call(keys=_KEYS, args=argv)
            except redis.ResponseError as error:
                if not _is_gone(error):
                    raise
                self._redis.delete(_EPOCH)  # somebody took the group alone
                return call(keys=_KEYS, args=argv)

    def _read(self, worker: str, count_max: int, *, wait_s: float) -> list[Sequence[Any]]:
        """Wait for the next entries, outside of scripts: those cannot wait."""
        with _meaning():
            try:
                answer: Any = self._redis.xreadgroup(
                    _GROUP, worker, {_STREAM: ">"}, count_max, max(1, round(wait_s * 1000))
                )
            except redis.ResponseError as error:
                if not _is_gone(error):
                    raise
                return []  # emptied meanwhile: the next script begins it anew
        return [
            (entry_id, 1, fields["item"], fields["deliveries"])
            for _, entries in answer or ()
            for entry_id, fields in entries
        ]


def _claim(entry_id: str, delivery: int, item: str, before: str) -> Claim:
    return Claim(item=item, token=f"{entry_id}/{delivery}", deliveries=int(before) + delivery)


def _is_gone(error: redis.ResponseError) -> bool:
    return any(word in str(error) for word in ("NOGROUP", "UNBLOCKED", "no longer exists"))


@contextmanager
def _meaning() -> Iterator[None]:
    try:
        yield
    except redis.RedisError as cause:
        raise UnavailableError(f"queue does not answer: {cause}") from cause
