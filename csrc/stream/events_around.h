// The two events that a queued collective needs, shared by all who need them.
#pragma once

#include <memory>

#include "shardcomm/stream.h"

namespace shardcomm {

// In this scope this thread puts one collective on a device's stream, whose turn comes with
// `before`. Who queues it wants an event of its end, and a communicator that watches over it wants
// both: it takes `before`, and leaves its own event of the end in `after`.
class EventsAround {
 public:
  explicit EventsAround(std::shared_ptr<Event> before);
  ~EventsAround();
  EventsAround(const EventsAround&) = delete;
  EventsAround& operator=(const EventsAround&) = delete;

  // This thread's; null outside of any scope.
  static EventsAround* current();

  const std::shared_ptr<Event> before;  // null: nobody has recorded one
  std::shared_ptr<Event> after;
};

}  // namespace shardcomm
