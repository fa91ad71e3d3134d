// How threads wait for messages, and learn that there will be none.
#include <algorithm>
#include <sstream>
#include <string>

#include "comm/inspect.h"
#include "comm/mailbox.h"
#include "comm/polling.h"
#include "shardcomm/error.h"
#include "stream/wait_check.h"

namespace shardcomm {
namespace {

std::chrono::nanoseconds as_duration(double seconds) {
  constexpr double kMost = 1e9;  // 30 years, which the clock can hold
  return std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(seconds, kMost) * 1e9));
}

// While alive, the lock is open.
template <class Lock>
class Unlocked {
 public:
  explicit Unlocked(Lock& lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() { lock_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Lock& lock_;
};

}  // namespace

// A thread's wait for a request or, if that is null, for any.
struct Mailbox::Wait {
  Wait(Mailbox& box, Request* what, std::optional<double> timeout)
      : mailbox(box), request(what), timeout_s(timeout), since(Clock::now()), waited(since) {
    if (request != nullptr) ++request->waiters;
  }
  ~Wait() {
    if (request != nullptr) --request->waiters;
    mailbox.leaves(*this);
    mailbox.settle();
  }
  Wait(const Wait&) = delete;
  Wait& operator=(const Wait&) = delete;

  Call call() const { return request == nullptr ? Call{} : Mail::call_of(*request); }
  Clock::time_point end() const {
    return timeout_s ? since + as_duration(*timeout_s) : Clock::time_point::max();
  }

  Mailbox& mailbox;
  Request* const request;
  const std::optional<double> timeout_s;
  const Clock::time_point since;
  Waited waited;
  std::size_t moved = 0;  // bytes of the request, at the last look for trouble
};

// While alive, a thread polls, or sleeps.
class Mailbox::Counted {
 public:
  Counted(Mailbox& mailbox, int& threads) : mailbox_(mailbox), threads_(threads) {
    ++threads_;
    mailbox_.settle();
  }
  ~Counted() {
    --threads_;
    mailbox_.settle();
  }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  Mailbox& mailbox_;
  int& threads_;
};

// False if the timeout has passed.
bool Mailbox::wait_for(Lock& lock, Request* request, std::optional<double> timeout_s) {
  if (is_ready(request)) return true;
  Wait wait(*this, request, timeout_s);
  group_.throw_if_ended(wait.call());
  move(request);
  while (!is_ready(request)) {
    const Clock::time_point now = Clock::now();
    if (now >= wait.end()) return false;
    if (attend(lock, wait, std::min(wait.end(), now + kWaitSlice))) return true;
    {
      const Unlocked unlocked(lock);
      check_wait();
    }
    look_for_trouble(wait);
  }
  return true;
}

bool Mailbox::is_ready(const Request* request) const {
  return request == nullptr ? woken_ || !untold_.empty() : request->ended;
}

bool Mailbox::is_over() const { return group_.has_failed() || group_.closed(group_.rank()); }

// Polls and sleeps in turns, until it is ready, or over, or `end`.
bool Mailbox::attend(Lock& lock, const Wait& wait, Clock::time_point end) {
  while (Clock::now() < end && !is_over()) {
    if (poll(lock, wait, end) || sleep(lock, wait, end)) return true;
  }
  return false;
}

// Goes on for as long as something changes again and again.
bool Mailbox::poll(Lock& lock, const Wait& wait, Clock::time_point end) {
  // Who waits for any request waits in the background, and leaves this to the others.
  if (wait.request == nullptr && (polling_ > 0 || !mail_.is_pending())) return false;
  const Counted polls(*this, polling_);
  do {
    const std::uint64_t seen = looked_at_ + changes_.load();
    const bool has_more = mail_.has_more();  // of a long message, which goes a few fragments a look
    const auto is_changed = [&] { return has_more || mail_.activity() + changes_.load() != seen; };
    {
      const Unlocked unlocked(lock);
      if (!spin(has_core_, is_changed) && !shardcomm::poll(has_core_, Clock::now(), is_changed)) {
        return false;
      }
    }
    move(wait.request);
    if (is_ready(wait.request)) return true;
  } while (Clock::now() < end);
  return false;
}

bool Mailbox::sleep(Lock& lock, const Wait& wait, Clock::time_point end) {
  falls_asleep(wait);
  const std::uint32_t rung = bell().rung.load();
  const Counted sleeps(*this, sleeping_);
  // Before the bell was armed, others could do things unheard. What they do from now on rings.
  const bool moved = move(wait.request);
  if (is_ready(wait.request)) return true;
  if (moved || is_over()) return false;
  const Unlocked unlocked(lock);
  const Clock::time_point now = Clock::now();
  if (now < end) sleep_while(bell().rung, rung, end - now);
  return false;  // who was woken looks again
}

// Of the threads that wait for a request, others are told of the one that fell asleep first.
void Mailbox::falls_asleep(const Wait& wait) {
  const bool known = std::find(asleep_.begin(), asleep_.end(), &wait) != asleep_.end();
  if (wait.request == nullptr || known) return;
  asleep_.push_back(&wait);
  if (asleep_.front() == &wait) group_.tell_message(wait.call(), wait.since);
}

// After a failure they go on to be told of it.
void Mailbox::leaves(const Wait& wait) noexcept {
  const auto known = std::find(asleep_.begin(), asleep_.end(), &wait);
  if (known == asleep_.end()) return;
  asleep_.erase(known);
  if (group_.has_failed()) return;
  if (asleep_.empty()) return group_.tell_message(std::nullopt, {});
  group_.tell_message(asleep_.front()->call(), asleep_.front()->since);
}

void Mailbox::look_for_trouble(Wait& wait) {
  if (wait.request != nullptr && wait.moved != wait.request->moved) {
    wait.moved = wait.request->moved;
    wait.waited = Waited(Clock::now());  // it goes on, however slowly
  }
  // Before the looks: what has not come by then is late. So is what ranks sent before they left.
  const bool has_deadline = wait.request != nullptr && !wait.timeout_s;
  const bool overdue = has_deadline && wait.waited.until_now().count() > group_.deadline_s();
  std::vector<Trouble> gone(static_cast<std::size_t>(group_.size()), Trouble::none);
  for (int r = 0; r < group_.size(); ++r) {
    if (r == group_.rank()) continue;
    if (group_.closed(r)) {
      gone[static_cast<std::size_t>(r)] = Trouble::closed;
    } else if (group_.has_ended(r)) {
      gone[static_cast<std::size_t>(r)] = Trouble::died;
    }
  }
  move(wait.request);
  if (is_ready(wait.request)) return;
  group_.throw_if_ended(wait.call());
  if (wait.request == nullptr) {
    mail_.for_each_pending([&](const Request& request) { blame(request, gone); });
  } else {
    blame(*wait.request, gone);
    if (overdue) blame_for_delay(*wait.request);
  }
}

// Throws if what the request waits for will never come. From any rank a message may come as long as
// one is left; but one that died may have been about to send it.
void Mailbox::blame(const Request& request, const std::vector<Trouble>& gone) {
  const int peer = request.source >= 0 ? request.source : request.peer;
  int culprit = peer;
  if (peer == kAnySource) {
    const auto died = std::find(gone.begin(), gone.end(), Trouble::died);
    const auto left = std::count(gone.begin(), gone.end(), Trouble::none) - 1;  // without itself
    if (died != gone.end()) {
      culprit = static_cast<int>(died - gone.begin());
    } else if (left == 0 && group_.size() > 1) {
      culprit = group_.rank() == 0 ? 1 : 0;
    } else {
      return;
    }
  }
  const Trouble trouble = gone[static_cast<std::size_t>(culprit)];
  if (trouble == Trouble::none) return;
  group_.fail(trouble, culprit);
  group_.throw_if_failed(Mail::call_of(request));
}

// A rank that waits itself is not late. If none of those is that this rank waits for, at first or
// at second hand, they wait for each other.
void Mailbox::blame_for_delay(const Request& request) {
  const std::vector<Pending> waits = pending(group_);
  std::vector<int> held_up{group_.rank()};  // and then whom they wait for
  const auto add = [&](const std::vector<int>& ranks) {
    for (const int rank : ranks) {
      const bool known = std::find(held_up.begin(), held_up.end(), rank) != held_up.end();
      if (!known) held_up.push_back(rank);
    }
  };
  add(waits_for(group_, group_.rank(), Mail::call_of(request)));
  for (std::size_t i = 1; i < held_up.size(); ++i) {
    bool is_waiting = false;
    for (const Pending& wait : waits) {
      if (wait.rank != held_up[i] || wait.waits_for.empty()) continue;
      is_waiting = true;
      add(wait.waits_for);
    }
    if (is_waiting) continue;
    group_.late(held_up[i]);
    group_.throw_if_failed(Mail::call_of(request));
  }
  std::ostringstream text;
  text << group_.who(group_.rank()) << " waited for " << group_.deadline_s()
       << " s, and ranks wait for each other: " << group_.pending_calls();
  group_.throw_mismatch(text.str(), Mail::call_of(request));
}

}  // namespace shardcomm
