"""Whether the real managers agree: targets, driver, scenarios, rendering, replay, command line."""
