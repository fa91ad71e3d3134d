// The messages of one rank: its sends and receives, and how bytes get from one rank's to another's.
// Nothing here waits; one thread at a time may use it (comm/mailbox.h).
//
//   sender     queued ──message──────────────────────────────────────────────► ended
//              queued ──announcement──► announced ──► cleared ──fragments──►   ended
//                                          ▲                        │
//                                      clearance                    ▼
//   receiver   posted ──► matched ─────────┘          ──► receiving ────────►  ended
//
// A small message goes through the ring at once, and waits on the heap of its destination if no
// receive takes it yet. Of a large one only an announcement goes. Its bytes follow in fragments
// when a receive has taken it. So a large message that nobody receives takes no memory, and a
// receive knows the size of what it takes before any byte of it moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "comm/group.h"
#include "comm/mail_ring.h"

namespace shardcomm {

inline constexpr int kAnySource = -1;

// The rings of a group, in memory that its ranks share: from every rank to every rank, also itself.
struct MailMemory {
  std::byte* base;
  int size;
  std::size_t capacity;  // of a ring; a power of two

  MailRing* ring(int from, int to) const;

  static std::size_t ring_capacity(int size);
  static std::size_t bytes(int size);
};

// A message that has arrived, and that no receive has taken.
struct Arrived {
  std::uint64_t arrival;  // its number among all ranks' messages to this one
  std::int64_t tag;
  std::uint64_t bytes;
  std::uint64_t id;                      // 0: it is small
  std::unique_ptr<std::byte[]> payload;  // of a small one that is not empty
};

// A send or a receive of this rank.
struct Request {
  Op op = Op::send;
  const std::byte* from = nullptr;  // a send's bytes
  std::byte* into = nullptr;        // a receive's
  std::size_t bytes = 0;
  int peer = 0;  // the destination, or the source, or any
  std::int64_t tag = 0;
  void* context = nullptr;  // of whoever started it

  std::uint64_t number = 0;  // among this rank's requests, from 1 on
  int source = kAnySource;   // a receive's, when it has taken a message
  std::uint64_t id = 0;      // of a large message whose other rank knows of it; else 0
  std::size_t moved = 0;     // bytes of a large message
  bool ended = false;
  bool abandoned = false;              // a receive that was cancelled before its clearance
  int waiters = 0;                     // threads that wait for it
  std::list<Request>* list = nullptr;  // the one it is in, which says how far it has come
};

class Mail {
 public:
  using Requests = std::list<Request>;
  using Ticket = Requests::iterator;

  Mail(Group& group, const MailMemory& memory);

  // Begins what `request` says. Throws CommError, which ends the group, if a message has arrived
  // for it that is of another size.
  Ticket start(Request request);
  // Sends a small message without a request, if no request is pending, and there is room for it.
  bool send_now(int destination, const std::byte* from, std::size_t bytes,
                std::int64_t tag) noexcept;
  // Receives a small message without a request, if none is pending, and if it is the next of all
  // that `source` has sent.
  bool recv_now(int source, std::byte* into, std::size_t bytes, std::int64_t tag);
  // Forgets a request, and does not touch its buffer any more, whatever has become of it.
  void cancel(Ticket request) noexcept;
  // Moves what can be moved now, once round; false if that was nothing. Throws as `start` does, and
  // std::bad_alloc if there is no memory for a message, which stays where it is.
  bool move();

  // Whether there was more to move, after a call that moved much.
  bool has_more() const { return has_more_; }

  // Those that have ended, in this order, until they are put elsewhere.
  Requests& ended() { return ended_; }
  static void put(Ticket request, Requests& to);

  // Whether anything waits for other ranks, which must then ring.
  bool is_pending() const { return pending_ > 0; }
  // The requests that wait for other ranks.
  template <class Visit>
  void for_each_pending(Visit&& visit) const;
  // Any thread may ask. Changes when `move` may have something to do because of other ranks.
  std::uint64_t activity() const;

  static Call call_of(const Request& request);

 private:
  struct Peer {
    int rank = 0;
    MailWriter out;
    MailReader in;
    // Sends to it.
    Requests queued;     // nothing was written of them
    Requests announced;  // large ones
    Requests cleared;    // fragments are written
    Requests withdrawn;  // large ones that were cancelled; it does not know yet
    // Receives from it.
    Requests posted;     // have taken no message
    Requests matched;    // have taken a large message; it does not know yet
    Requests receiving;  // fragments are read
    std::list<Arrived> arrived;
    std::size_t turn = 0;  // which of the lists is the next to write of
  };
  using Found = std::pair<Peer*, std::list<Arrived>::iterator>;

  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }

  bool write_to(Peer& peer) noexcept;
  bool write_next(Peer& peer, Requests& list) noexcept;
  bool write_first(Peer& peer, Ticket request) noexcept;
  bool write_fragment(Peer& peer, Ticket request) noexcept;
  bool read_from(Peer& peer);
  void read_message(Peer& peer, const Frame& frame);
  void read_clearance(Peer& peer, const Frame& frame);
  void read_fragment(Peer& peer, const Frame& frame);
  void read_withdrawal(Peer& peer, const Frame& frame);

  // The receive that takes a message of this tag from `peer`; the end of `any_posted_` if none
  // does.
  Ticket receive_for(Peer& peer, std::int64_t tag);
  // The message that a receive takes, of those that have arrived.
  std::optional<Found> arrived_for(const Request& receive);
  void take_arrived(Ticket receive, const Found& found);
  void post(Ticket receive);
  void check_size(const Request& receive, int source, std::uint64_t bytes) const;
  void end(Ticket request);

  Group& group_;
  std::size_t most_small_;     // bytes that a small message has at most
  std::size_t most_fragment_;  // bytes of a fragment
  std::vector<Peer> peers_;
  Requests any_posted_;  // receives from any source that have taken no message
  Requests ended_;
  std::uint64_t started_ = 0;   // requests, ever
  std::uint64_t arrivals_ = 0;  // messages, ever
  std::size_t pending_ = 0;     // requests that have not ended, or of which a peer must hear
  bool has_more_ = false;
};

template <class Visit>
void Mail::for_each_pending(Visit&& visit) const {
  for (const Request& request : any_posted_) visit(request);
  for (const Peer& peer : peers_) {
    for (const Requests* list : {&peer.queued, &peer.announced, &peer.cleared, &peer.posted,
                                 &peer.matched, &peer.receiving}) {
      for (const Request& request : *list) visit(request);
    }
  }
}

}  // namespace shardcomm
