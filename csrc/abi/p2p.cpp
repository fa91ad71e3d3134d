// Messages between two ranks, in C.
#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "abi/arguments.h"
#include "abi/handles.h"
#include "abi/status.h"
#include "comm/mail.h"
#include "comm/mailbox.h"
#include "shardcomm.h"
#include "shardcomm/communicator.h"

using shardcomm::Communicator;
using shardcomm::Mailbox;
using shardcomm::abi::checked;
using shardcomm::abi::guarded;
using shardcomm::abi::hand_over;
using shardcomm::abi::required;

static_assert(SHC_ANY_SOURCE == shardcomm::kAnySource);

// The mailbox gives it its ticket before shc_wait_any can tell of it.
struct shc_request : shardcomm::abi::Handle<shardcomm::abi::Kind::request> {
  explicit shc_request(std::shared_ptr<Communicator> of) : comm(std::move(of)) {}
  ~shc_request() {
    if (ticket) mailbox().cancel(*ticket);
  }
  shc_request(const shc_request&) = delete;
  shc_request& operator=(const shc_request&) = delete;

  Mailbox& mailbox() const { return comm->mailbox(); }

  std::shared_ptr<Communicator> comm;
  std::optional<Mailbox::Ticket> ticket;
};

namespace {

template <class Start>
shc_status start(const char* function, shc_comm* comm, shc_request** request, Start&& start) {
  return guarded(function, [&] {
    shc_request*& result = required(request, "request");
    auto made = std::make_unique<shc_request>(checked(comm, "comm").comm);
    start(*made);
    hand_over(result, std::move(made));
  });
}

// Nothing: without end.
std::optional<double> timeout_of(double timeout_s) {
  if (std::isnan(timeout_s)) throw std::invalid_argument("timeout_s is not a number");
  return timeout_s < 0 ? std::nullopt : std::optional(timeout_s);
}

}  // namespace

shc_status shc_send(shc_comm* comm, const void* buffer, size_t bytes, int destination,
                    int64_t tag) {
  return guarded("shc_send", [&] {
    checked(comm, "comm").comm->mailbox().send(buffer, bytes, destination, tag);
  });
}

shc_status shc_recv(shc_comm* comm, void* buffer, size_t bytes, int source, int64_t tag,
                    int* sender) {
  return guarded("shc_recv", [&] {
    const int from = checked(comm, "comm").comm->mailbox().recv(buffer, bytes, source, tag);
    if (sender != nullptr) *sender = from;
  });
}

shc_status shc_isend(shc_comm* comm, const void* buffer, size_t bytes, int destination, int64_t tag,
                     shc_request** request) {
  return start("shc_isend", comm, request, [&](shc_request& made) {
    made.mailbox().isend(buffer, bytes, destination, tag, &made, &made.ticket);
  });
}

shc_status shc_irecv(shc_comm* comm, void* buffer, size_t bytes, int source, int64_t tag,
                     shc_request** request) {
  return start("shc_irecv", comm, request, [&](shc_request& made) {
    made.mailbox().irecv(buffer, bytes, source, tag, &made, &made.ticket);
  });
}

shc_status shc_request_test(shc_request* request) {
  return guarded("shc_request_test", [&] {
    const shc_request& known = checked(request, "request");
    return known.mailbox().test(*known.ticket) ? SHC_OK : SHC_NOT_READY;
  });
}

shc_status shc_request_wait(shc_request* request, double timeout_s) {
  return guarded("shc_request_wait", [&] {
    const shc_request& known = checked(request, "request");
    const bool ended = known.mailbox().wait(*known.ticket, timeout_of(timeout_s));
    return ended ? SHC_OK : SHC_NOT_READY;
  });
}

shc_status shc_request_source(const shc_request* request, int* source) {
  return guarded("shc_request_source", [&] {
    int& result = required(source, "source");
    const shc_request& known = checked(request, "request");
    const std::optional<int> from = known.mailbox().source(*known.ticket);
    if (from) result = *from;
    return from ? SHC_OK : SHC_NOT_READY;
  });
}

void shc_request_destroy(shc_request* request) { shardcomm::abi::destroy(request); }

shc_status shc_wait_any(shc_comm* comm, double timeout_s, shc_request** request) {
  return guarded("shc_wait_any", [&] {
    shc_request*& result = required(request, "request");
    void* ended = checked(comm, "comm").comm->mailbox().wait_any(timeout_of(timeout_s));
    if (ended != nullptr) result = static_cast<shc_request*>(ended);
    return ended != nullptr ? SHC_OK : SHC_NOT_READY;
  });
}

shc_status shc_wake_any(shc_comm* comm) {
  return guarded("shc_wake_any", [&] { checked(comm, "comm").comm->mailbox().wake_any(); });
}
