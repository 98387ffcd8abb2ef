-- FRONT_HOLD: seconds to hold a request while no replica is up; FRONT_SERVER_KEY: file of the
-- servers' own key; FRONT_STATES: the agent's file of replicas out of rotation; FRONT_TARGETS: file
-- of Prometheus' list. HAProxy reads files before it gives up its rights.
local hold, key_file = tonumber(os.getenv("FRONT_HOLD")), os.getenv("FRONT_SERVER_KEY")
local targets = assert(io.open(os.getenv("FRONT_TARGETS"))):read("a")
local states_file = io.open(os.getenv("FRONT_STATES"))
local states = states_file and states_file:read("a") or ""

-- HAProxy's own file of states would also bring back the ports of replicas that have moved.
core.register_init(function()
  for backend, name, state in states:gmatch("(%S+)/(%S+) (%a+)") do
    local replica = core.backends[backend] and core.backends[backend].servers[name]
    if replica and state == "drain" then replica:set_drain() end
    if replica and state == "maint" then replica:set_maint() end
  end
end)

core.register_action("hold", {"http-req"}, function(txn)
  local ready, start = txn:get_var("txn.ready"), core.now().sec
  while txn.f:nbsrv(ready) == 0 and core.now().sec - start < hold do core.msleep(200) end
end)

-- 503 after the whole body: HAProxy drops an answer that comes before the end of a long one.
core.register_service("unavailable", "http", function(applet)
  while applet:receive(65536) ~= "" do end
  applet:set_status(503)
  applet:start_response()
end)

-- `http-request return` answers an empty 200 instead of a list that exceeds a buffer.
core.register_service("targets", "http", function(applet)
  applet:set_status(200)
  applet:add_header("content-type", "application/json")
  applet:add_header("content-length", tostring(#targets))
  applet:start_response()
  applet:send(targets)
end)

local key = key_file and assert(io.open(key_file)):read("l")
core.register_fetches("server_key", function() return key end)
