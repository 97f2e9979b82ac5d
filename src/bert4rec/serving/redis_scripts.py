"""What Redis does by itself for a store: Lua, which it runs alone and at once.

The scripts that read answer with one JSON text, as the client takes a long reply apart slowly, and
would keep the event loop from everything else meanwhile.
"""

# ARGV: how many events to remember, how many users, the users, then six texts for each event:
# number of the user from 0, id ('' or '+' and the id), is the time given, time, kind, item.
# A member of a history is arrival (16 digits), kind (i or s), length of the id (8), id, item.
ADD = """
local remembered, n_users = tonumber(ARGV[1]), tonumber(ARGV[2])
local fresh, seen = {}, {}
for at = 3 + n_users, #ARGV, 6 do
  local user, id, content = tonumber(ARGV[at]), ARGV[at + 1], ARGV[at + 3] .. '|' .. ARGV[at + 5]
  local known = false
  if id ~= '' then
    local key = ARGV[at] .. id
    known = seen[key] or redis.call('HGET', KEYS[5 + 2 * user], id)
    if known and known ~= content then
      local item = string.sub(known, string.find(known, '|', 1, true) + 1)
      if ARGV[at + 2] == '1' or item ~= ARGV[at + 5] then return {-1, 0} end
    end
    seen[key] = known or content
  end
  if not known then fresh[#fresh + 1] = at end
end
local arrival = redis.call('INCRBY', KEYS[1], #fresh) - #fresh
local latest = {}
for n, at in ipairs(fresh) do
  local user, id, moment = tonumber(ARGV[at]), ARGV[at + 1], ARGV[at + 3]
  local member = string.format('%016.0f', arrival + n) .. ARGV[at + 4]
    .. string.format('%08d', #id) .. id .. ARGV[at + 5]
  redis.call('ZADD', KEYS[4 + 2 * user], moment, member)
  if id ~= '' then redis.call('HSET', KEYS[5 + 2 * user], id, moment .. '|' .. ARGV[at + 5]) end
  if not latest[user] or tonumber(moment) > tonumber(latest[user]) then latest[user] = moment end
end
for user, moment in pairs(latest) do
  redis.call('ZADD', KEYS[2], 'GT', moment, ARGV[3 + user])
  redis.call('ZADD', KEYS[3], 0, ARGV[3 + user])
  local history = KEYS[4 + 2 * user]
  local n_old = redis.call('ZCARD', history) - remembered
  if n_old > 0 then
    for _, member in ipairs(redis.call('ZRANGE', history, 0, n_old - 1)) do
      local n_id = tonumber(string.sub(member, 18, 25))
      if n_id > 0 then redis.call('HDEL', KEYS[5 + 2 * user], string.sub(member, 26, 25 + n_id)) end
    end
    redis.call('ZREMRANGEBYRANK', history, 0, n_old - 1)
  end
end
return {#fresh, (#ARGV - 2 - n_users) / 6 - #fresh}
"""

# ARGV: how many. Members and their times, the oldest first.
HISTORY = "return cjson.encode(redis.call('ZRANGE', KEYS[1], -ARGV[1], -1, 'WITHSCORES'))"

# ARGV: from and to, in the order of names. Users and their times.
WITHIN = """
local names, found = redis.call('ZRANGEBYLEX', KEYS[1], ARGV[1], ARGV[2]), {}
for n, name in ipairs(names) do
  found[2 * n - 1], found[2 * n] = name, redis.call('ZSCORE', KEYS[2], name)
end
return cjson.encode(found)
"""

# ARGV: from and to, in the order of time, and a prefix. How many users were looked at, and those
# with the prefix and their times.
NEWEST = """
local page = redis.call('ZREVRANGE', KEYS[1], ARGV[1], ARGV[2], 'WITHSCORES')
local found, prefix = {}, ARGV[3]
for n = 1, #page, 2 do
  if string.sub(page[n], 1, #prefix) == prefix then
    found[#found + 1], found[#found + 2] = page[n], page[n + 1]
  end
end
return cjson.encode({#page / 2, found})
"""
