-- wrk requests recommendations: histories of 50 items of a catalogue of 3,416.
--   wrk ... -s recommend.lua URL -- DELAY [patient]
-- DELAY: milliseconds between a response and the next request;
-- patient: who is refused waits a second, as Retry-After says, before the next request.
-- At the end one line of JSON.

local N_ITEMS, LENGTH, N_BODIES = 3416, 50, 256
local threads = {}

function setup(thread)
  table.insert(threads, thread)
  thread:set("number", #threads)
end

function init(arguments)
  math.randomseed(number)
  n_ok, n_overloaded, n_other, at = 0, 0, 0, 0
  local mean = tonumber(arguments[1] or "0")
  if mean > 0 then  -- defined only then: wrk asks once whether it is there
    delay = function() return math.random(math.floor(mean * 0.5), math.ceil(mean * 1.5)) end
  end
  is_patient = arguments[2] == "patient"
  if is_patient then  -- answers and pauses come in the same order, near enough
    pauses, first_pause, last_pause = {}, 1, 0
    delay = function()
      if first_pause > last_pause then return 0 end  -- before the first answer
      local pause = pauses[first_pause]
      pauses[first_pause] = nil
      first_pause = first_pause + 1
      return pause
    end
  end
  requests = {}
  for body = 1, N_BODIES do
    local items = {}
    for place = 1, LENGTH do
      items[place] = '"item-' .. math.random(0, N_ITEMS - 1) .. '"'
    end
    local content = '{"history":[' .. table.concat(items, ",") .. '],"k":10}'
    local headers = {["content-type"] = "application/json"}
    requests[body] = wrk.format("POST", "/v1/recommend", headers, content)
  end
end

function request()
  at = at % N_BODIES + 1
  return requests[at]
end

function response(status)
  if is_patient then
    last_pause = last_pause + 1
    pauses[last_pause] = status == 503 and 1000 or 0
  end
  if status == 200 then n_ok = n_ok + 1
  elseif status == 503 then n_overloaded = n_overloaded + 1
  else n_other = n_other + 1 end
end

function done(summary, latency)
  local ok, overloaded, other = 0, 0, 0
  for _, thread in ipairs(threads) do
    ok = ok + thread:get("n_ok")
    overloaded = overloaded + thread:get("n_overloaded")
    other = other + thread:get("n_other")
  end
  local errors = summary.errors
  io.write(string.format(
    '\n{"seconds": %.3f, "n_ok": %d, "n_overloaded": %d, "n_other": %d, "n_broken": %d, '
      .. '"p50_ms": %.2f, "p99_ms": %.2f}\n',
    summary.duration / 1e6, ok, overloaded, other,
    errors.connect + errors.read + errors.write + errors.timeout,
    latency:percentile(50) / 1000, latency:percentile(99) / 1000))
end
