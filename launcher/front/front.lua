-- FRONT_HOLD: seconds to hold a request while no replica is up; FRONT_SERVER_KEY: file of the
-- servers' own key.
local hold, key_file = tonumber(os.getenv("FRONT_HOLD")), os.getenv("FRONT_SERVER_KEY")

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

local key = key_file and assert(io.open(key_file)):read("l")
core.register_fetches("server_key", function() return key end)
