// The two events around a queued collective, which the caller and the communicator share.
#pragma once

#include <memory>

#include "shardcomm/stream.h"

namespace shardcomm {

// In this scope this thread puts one collective on a device's stream. The collective's turn comes
// when `before` has fired. The caller needs an event of its end, and a communicator that watches it
// needs both events. So the communicator takes `before`, and leaves its own event of the end in
// `after`.
class EventsAround {
 public:
  explicit EventsAround(std::shared_ptr<Event> before);
  ~EventsAround();
  EventsAround(const EventsAround&) = delete;
  EventsAround& operator=(const EventsAround&) = delete;

  // This thread's innermost scope; null if it is in none.
  static EventsAround* current();

  const std::shared_ptr<Event> before;  // null: nobody has recorded one
  std::shared_ptr<Event> after;
};

}  // namespace shardcomm
