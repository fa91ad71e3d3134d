#include "stream/events_around.h"

#include <utility>

namespace shardcomm {
namespace {

thread_local EventsAround* around = nullptr;

}  // namespace

EventsAround::EventsAround(std::shared_ptr<Event> recorded) : before(std::move(recorded)) {
  around = this;
}
EventsAround::~EventsAround() { around = nullptr; }

EventsAround* EventsAround::current() { return around; }

}  // namespace shardcomm
