// The sends and receives of a rank of a group that shares memory, for all its threads: what they
// start, ask and wait for.
//
// Bytes move while some thread of the rank is in a function of this class. A thread that waits
// polls for a short while, and then sleeps until the rank's doorbell rings. The bell is armed only
// while threads sleep, none polls, and something is pending: so other ranks ring for no
// thread that waits in the background, while another thread of the rank polls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/mail.h"
#include "comm/waited.h"

namespace shardcomm {

// Any thread of the rank may call any function, several at once. Functions throw CommError if the
// group has failed, if this rank has closed it, or if this process was forked from the rank's.
class Mailbox {
 public:
  // A send or a receive, from its start until `cancel`.
  using Ticket = Mail::Ticket;

  Mailbox(Group& group, const MailMemory& memory);

  // Start a send or a receive, and never wait. `wait_any` tells of it by its `context`; of one
  // without, it does not tell. `known` gets the ticket before any thread is told of the request.
  // Throw std::invalid_argument for what is no buffer or no rank.
  Ticket isend(const void* buffer, std::size_t bytes, int destination, std::int64_t tag,
               void* context = nullptr, std::optional<Ticket>* known = nullptr);
  Ticket irecv(void* buffer, std::size_t bytes, int source, std::int64_t tag,
               void* context = nullptr, std::optional<Ticket>* known = nullptr);
  // Whether it has ended.
  bool test(Ticket request);
  // Whether it has ended within `timeout_s` seconds. Without a timeout the group's deadline holds,
  // which ends the group.
  bool wait(Ticket request, std::optional<double> timeout_s = std::nullopt);
  // A send's destination, or who sent to a receive that has ended; nothing if that is open.
  std::optional<int> source(Ticket request) const;
  // Ends it, if it has not ended, and forgets it. Its buffer is not touched any more.
  void cancel(Ticket request) noexcept;

  void send(const void* buffer, std::size_t bytes, int destination, std::int64_t tag);
  // Returns who sent.
  int recv(void* buffer, std::size_t bytes, int source, std::int64_t tag);

  // The context of a request that has ended since it was started, and of which nobody was told yet.
  // Null: there was none within `timeout_s` seconds, or `wake_any` was called. Without a timeout
  // this waits for as long as the group lives.
  void* wait_any(std::optional<double> timeout_s = std::nullopt);
  // Ends one `wait_any`, a present or the next one.
  void wake_any();

 private:
  using Lock = std::unique_lock<Mutex>;
  struct Wait;
  class Counted;

  Doorbell& bell() const { return group_.doorbell(group_.rank()); }
  void refuse_child() const;
  Request checked(Op op, const void* buffer, std::size_t bytes, int peer, std::int64_t tag) const;

  // All of these hold the lock. `request`: what the thread starts or waits for; null: any.
  Ticket start(Request request, std::optional<Ticket>* known = nullptr);
  int run(Lock& lock, Request request);
  bool move(const Request* request);
  void notify() noexcept;
  void settle() noexcept;
  bool wait_for(Lock& lock, Request* request, std::optional<double> timeout_s);
  bool is_ready(const Request* request) const;
  bool is_over() const;
  bool attend(Lock& lock, const Wait& wait, Clock::time_point end);
  bool poll(Lock& lock, const Wait& wait, Clock::time_point end);
  bool sleep(Lock& lock, const Wait& wait, Clock::time_point end);
  void falls_asleep(const Wait& wait);
  void leaves(const Wait& wait) noexcept;
  void look_for_trouble(Wait& wait);
  void blame(const Request& request, const std::vector<Trouble>& gone);
  [[noreturn]] void blame_for_delay(const Request& request);

  Group& group_;
  const bool has_core_;
  mutable Mutex mutex_;
  Mail mail_;
  Mail::Requests untold_;  // those that have ended, and of which `wait_any` is to tell
  Mail::Requests told_;
  bool woken_ = false;  // by `wake_any`
  int polling_ = 0;     // threads that look all the time
  int sleeping_ = 0;    // threads that sleep, or are about to
  bool armed_ = false;
  std::uint64_t looked_at_ = 0;       // the activity of which the last look knew
  Atomic<std::uint64_t> changes_{0};  // of what threads may wait for, by this rank's threads
  std::vector<const Wait*> asleep_;   // for a request; the one that fell asleep first is the first
};

}  // namespace shardcomm
