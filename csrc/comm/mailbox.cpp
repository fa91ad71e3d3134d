#include "comm/mailbox.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "comm/polling.h"
#include "shardcomm/parts.h"

namespace shardcomm {
Mailbox::Mailbox(Group& group, const MailMemory& memory)
    : group_(group), has_core_(has_core(group.size())), mail_(group, memory) {}

Mailbox::Ticket Mailbox::isend(const void* buffer, std::size_t bytes, int destination,
                               std::int64_t tag, void* context, std::optional<Ticket>* known) {
  Request request = checked(Op::send, buffer, bytes, destination, tag);
  request.from = static_cast<const std::byte*>(buffer);
  request.context = context;
  const Lock lock(mutex_);
  return start(std::move(request), known);
}

Mailbox::Ticket Mailbox::irecv(void* buffer, std::size_t bytes, int source, std::int64_t tag,
                               void* context, std::optional<Ticket>* known) {
  Request request = checked(Op::recv, buffer, bytes, source, tag);
  request.into = static_cast<std::byte*>(buffer);
  request.context = context;
  const Lock lock(mutex_);
  return start(std::move(request), known);
}

bool Mailbox::test(Ticket request) {
  refuse_child();
  const Lock lock(mutex_);
  if (!request->ended) {
    group_.throw_if_ended(Mail::call_of(*request));
    move(&*request);
    settle();
  }
  if (request->ended) Mail::put(request, told_);
  return request->ended;
}

bool Mailbox::wait(Ticket request, std::optional<double> timeout_s) {
  refuse_child();
  Lock lock(mutex_);
  if (!wait_for(lock, &*request, timeout_s)) return false;
  Mail::put(request, told_);
  return true;
}

std::optional<int> Mailbox::source(Ticket request) const {
  refuse_child();
  const Lock lock(mutex_);
  if (request->op == Op::send) return request->peer;
  return request->ended ? std::optional(request->source) : std::nullopt;
}

void Mailbox::cancel(Ticket request) noexcept {
  if (group_.forked()) return;  // a thread of the parent's may hold the lock for ever
  const Lock lock(mutex_);
  mail_.cancel(request);
  settle();
}

void Mailbox::send(const void* buffer, std::size_t bytes, int destination, std::int64_t tag) {
  Request request = checked(Op::send, buffer, bytes, destination, tag);
  request.from = static_cast<const std::byte*>(buffer);
  Lock lock(mutex_);
  group_.throw_if_ended(Mail::call_of(request));
  if (mail_.send_now(destination, request.from, bytes, tag)) return;
  run(lock, std::move(request));
}

int Mailbox::recv(void* buffer, std::size_t bytes, int source, std::int64_t tag) {
  Request request = checked(Op::recv, buffer, bytes, source, tag);
  request.into = static_cast<std::byte*>(buffer);
  Lock lock(mutex_);
  group_.throw_if_ended(Mail::call_of(request));
  const auto is_received = [&] { return mail_.recv_now(source, request.into, bytes, tag); };
  if (source != kAnySource && (is_received() || spin(has_core_, is_received))) return source;
  return run(lock, std::move(request));
}

void* Mailbox::wait_any(std::optional<double> timeout_s) {
  refuse_child();
  Lock lock(mutex_);
  if (!wait_for(lock, nullptr, timeout_s)) return nullptr;
  if (untold_.empty()) {
    woken_ = false;
    return nullptr;
  }
  const Ticket ended = untold_.begin();
  Mail::put(ended, told_);
  return ended->context;
}

void Mailbox::wake_any() {
  refuse_child();
  const Lock lock(mutex_);
  woken_ = true;
  notify();
}

void Mailbox::refuse_child() const {
  if (group_.forked()) group_.throw_if_ended({});
}

Request Mailbox::checked(Op op, const void* buffer, std::size_t bytes, int peer,
                         std::int64_t tag) const {
  const bool sends = op == Op::send;
  const std::string function = std::string(name(op)) + ": ";
  if (bytes > static_cast<std::size_t>(Parts::kMost)) {
    throw std::invalid_argument(function + "bytes is " + std::to_string(bytes) +
                                "; it must be at most 2^60");
  }
  if (buffer == nullptr && bytes > 0) {
    throw std::invalid_argument(function + "buffer is null, and bytes is " + std::to_string(bytes));
  }
  if (peer < (sends ? 0 : kAnySource) || peer >= group_.size()) {
    throw std::invalid_argument(function + (sends ? "destination" : "source") + " is " +
                                std::to_string(peer) + "; it must be a rank, 0 to " +
                                std::to_string(group_.size() - 1) +
                                (sends ? "" : ", or " + std::to_string(kAnySource) + " for any"));
  }
  refuse_child();
  Request request;
  request.op = op;
  request.bytes = bytes;
  request.peer = peer;
  request.tag = tag;
  return request;
}

// ---- With the lock held ----

Mailbox::Ticket Mailbox::start(Request request, std::optional<Ticket>* known) {
  group_.throw_if_ended(Mail::call_of(request));
  const Ticket started = mail_.start(std::move(request));
  try {
    move(&*started);
  } catch (...) {
    mail_.cancel(started);
    throw;
  }
  settle();
  if (known != nullptr) *known = started;
  return started;
}

// Starts it, waits for its end, and returns who sent.
int Mailbox::run(Lock& lock, Request request) {
  const Ticket started = start(std::move(request));
  try {
    wait_for(lock, &*started, std::nullopt);
  } catch (...) {
    mail_.cancel(started);
    settle();
    throw;
  }
  const int source = started->source;
  mail_.cancel(started);
  return source;
}

// Moves what can be moved; false if that was nothing. The thread sees itself whether its request
// has ended.
bool Mailbox::move(const Request* own) {
  const auto tell = [&] {
    bool others_wait = false;
    while (!mail_.ended().empty()) {
      const Ticket ended = mail_.ended().begin();
      const bool known = &*ended == own && ended->waiters <= 1;
      Mail::put(ended, known || ended->context == nullptr ? told_ : untold_);
      if (!known) others_wait = true;
    }
    if (others_wait) notify();
  };
  looked_at_ = mail_.activity();
  bool moved = false;
  try {
    moved = mail_.move();
  } catch (...) {
    tell();
    throw;
  }
  tell();
  return moved;
}

// Something has changed for which other threads may wait.
void Mailbox::notify() noexcept {
  changes_.fetch_add(1);
  if (sleeping_ > 0) bell().wake();
}

// Arms the bell if others are to ring it, and sees to it that what they did before is found. All
// that changes what this depends on calls it afterwards.
void Mailbox::settle() noexcept {
  const bool arm = sleeping_ > 0 && polling_ == 0 && mail_.is_pending();
  const bool is_new = arm && !armed_;
  if (arm != armed_) bell().armed.store(arm ? 1 : 0);
  armed_ = arm;
  if (mail_.has_more() || (is_new && mail_.activity() != looked_at_)) notify();
}

}  // namespace shardcomm
