-- The rate limiter: one fixed window per mesh and per member; an id takes at most one unit of each per window.
--
-- Keys, all with the hash tag {<mesh>}, so that a cluster keeps them in one slot; <window> counts windows since the epoch:
--   KEYS[1]           postroom:limit:{<mesh>}   the prefix of the two below; itself never written
--   <prefix>:<window>                 set   the ids that took a unit of the mesh     TTL: 2 windows
--   <prefix>:<window>:<member>        set   the ids that took a unit of the member   TTL: 2 windows
--
-- Arguments: member, units per mesh, units per member, window in seconds, then the ids, each once.
-- Answers: milliseconds until the next window, then the positions (from 1) of the ids that were denied. An id that is
-- denied by one set leaves no unit in the other, and one that is in both already always passes. The clock is Redis' own.

local member = ARGV[1]
local mesh_limit, member_limit = tonumber(ARGV[2]), tonumber(ARGV[3])
local window_ms = tonumber(ARGV[4]) * 1000
local first = 5

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local window = math.floor(now_ms / window_ms)
local mesh_key = KEYS[1] .. ':' .. string.format('%d', window)
local member_key = mesh_key .. ':' .. member

local ids = {unpack(ARGV, first)}
local in_mesh = redis.call('SMISMEMBER', mesh_key, unpack(ids))
local in_member = redis.call('SMISMEMBER', member_key, unpack(ids))
local mesh_left = math.max(0, mesh_limit - redis.call('SCARD', mesh_key))
local member_left = math.max(0, member_limit - redis.call('SCARD', member_key))

local answer = {window_ms - now_ms % window_ms}
local new_in_mesh, new_in_member = {}, {}
for position, id in ipairs(ids) do
  local mesh_cost, member_cost = 1 - in_mesh[position], 1 - in_member[position]
  if mesh_cost <= mesh_left and member_cost <= member_left then
    mesh_left, member_left = mesh_left - mesh_cost, member_left - member_cost
    if mesh_cost == 1 then new_in_mesh[#new_in_mesh + 1] = id end
    if member_cost == 1 then new_in_member[#new_in_member + 1] = id end
  else
    answer[#answer + 1] = position
  end
end

for key, new in pairs({[mesh_key] = new_in_mesh, [member_key] = new_in_member}) do
  if #new > 0 then
    redis.call('SADD', key, unpack(new))
    redis.call('PEXPIRE', key, 2 * window_ms)
  end
end
return answer
