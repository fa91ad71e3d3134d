#include "comm/mail.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <string>
#include <utility>

#include "copy/copy_bytes.h"

namespace shardcomm {
namespace {

template <class List, class Holds>
auto find(List& list, Holds&& holds) {
  return std::find_if(list.begin(), list.end(), std::forward<Holds>(holds));
}

template <class List>
auto find_id(List& list, std::uint64_t id) {
  return find(list, [id](const auto& entry) { return entry.id == id; });
}

Frame whole_message(std::size_t bytes, std::int64_t tag) {
  Frame frame;
  frame.payload = static_cast<std::uint32_t>(bytes);
  frame.tag = tag;
  frame.bytes = bytes;
  return frame;
}

}  // namespace

MailRing* MailMemory::ring(int from, int to) const {
  const auto index = static_cast<std::size_t>(from) * static_cast<std::size_t>(size) +
                     static_cast<std::size_t>(to);
  return reinterpret_cast<MailRing*>(base + index * MailRing::bytes(capacity));
}

// Messages of 64 KiB are 10 % slower through a ring of 64 KiB than through one of 256 KiB, and
// larger rings gain nothing. All rings into one rank together stay at 4 MiB.
std::size_t MailMemory::ring_capacity(int size) {
  std::size_t capacity = 256 * 1024;
  while (capacity > 16 * 1024 && capacity * static_cast<std::size_t>(size) > 4 * 1024 * 1024) {
    capacity /= 2;
  }
  return capacity;
}

std::size_t MailMemory::bytes(int size) {
  return MailRing::bytes(ring_capacity(size)) * static_cast<std::size_t>(size) *
         static_cast<std::size_t>(size);
}

Mail::Mail(Group& group, const MailMemory& memory)
    : group_(group),
      most_small_(std::min<std::size_t>(16 * 1024, memory.capacity / 4) - sizeof(Frame)),
      // Four frames of fragments fill a ring: while one is read, the next are written.
      most_fragment_(memory.capacity / 4 - sizeof(Frame)),
      peers_(static_cast<std::size_t>(group.size())) {
  const int own = group.rank();
  for (int r = 0; r < group.size(); ++r) {
    peer(r).rank = r;
    peer(r).out = {memory.ring(own, r), memory.capacity, &group.doorbell(r)};
    peer(r).in = {memory.ring(r, own), memory.capacity, &group.doorbell(r)};
  }
}

Mail::Ticket Mail::start(Request request) {
  Requests made;
  made.push_back(std::move(request));
  const Ticket ticket = made.begin();
  ticket->list = &made;
  ticket->number = ++started_;
  const bool receives = ticket->op == Op::recv;
  const std::optional<Found> found = receives ? arrived_for(*ticket) : std::nullopt;
  ++pending_;
  if (!receives) {
    put(ticket, peer(ticket->peer).queued);
  } else if (found) {
    take_arrived(ticket, *found);
  } else {
    post(ticket);
  }
  return ticket;
}

bool Mail::send_now(int destination, const std::byte* from, std::size_t bytes,
                    std::int64_t tag) noexcept {
  Peer& to = peer(destination);
  if (bytes > most_small_ || pending_ > 0) return false;
  if (!to.out.write(whole_message(bytes, tag), from)) return false;
  ++started_;
  return true;
}

bool Mail::recv_now(int source, std::byte* into, std::size_t bytes, std::int64_t tag) {
  Peer& from = peer(source);
  if (pending_ > 0 || !from.arrived.empty()) return false;
  from.in.look();
  const Frame* frame = from.in.front();
  if (frame == nullptr || frame->kind != Frame::Kind::message) return false;
  if (frame->tag != tag || frame->bytes != bytes) return false;
  from.in.take(into);
  ++started_;
  return true;
}

void Mail::cancel(Ticket request) noexcept {
  if (!request->ended) {
    if (request->op == Op::send && request->id != 0) {  // already announced: tell the destination
      Peer& destination = peer(request->peer);
      put(request, destination.withdrawn);
      write_to(destination);
      return;
    }
    if (request->source >= 0 && request->list == &peer(request->source).matched) {
      request->abandoned = true;  // its sender still needs the clearance, to end
      return;
    }
    --pending_;
  }
  request->list->erase(request);
}

bool Mail::move() {
  bool moved = false;
  has_more_ = false;
  for (Peer& peer : peers_) {
    if (read_from(peer)) moved = true;
  }
  for (Peer& peer : peers_) {  // second: reading may have queued replies
    if (write_to(peer)) moved = true;
  }
  return moved;
}

void Mail::put(Ticket request, Requests& to) {
  to.splice(to.end(), *request->list, request);
  request->list = &to;
}

void Mail::end(Ticket request) {
  request->ended = true;
  --pending_;
  put(request, ended_);
}

std::uint64_t Mail::activity() const {
  std::uint64_t sum = 0;
  for (const Peer& peer : peers_) sum += peer.in.activity() + peer.out.activity();
  return sum;
}

Call Mail::call_of(const Request& request) {
  Call call;
  call.op = request.op;
  call.root = request.peer;
  call.count = static_cast<std::int64_t>(request.bytes);
  call.tag = request.tag;
  call.sequence = request.number;
  return call;
}

// ---- Writing ----

// The lists take turns, so that a long message holds up no short one, nor many short ones a long
// one. At most so many fragments go at once: who starts a request is not to do others' work.
bool Mail::write_to(Peer& peer) noexcept {
  constexpr int kMostFragments = 4;
  const std::array<Requests*, 4> lists{&peer.withdrawn, &peer.matched, &peer.queued, &peer.cleared};
  bool moved = false;
  int fragments = 0;
  for (std::size_t empty = 0; empty < lists.size(); peer.turn = (peer.turn + 1) % lists.size()) {
    Requests& list = *lists[peer.turn];
    if (list.empty()) {
      ++empty;
      continue;
    }
    if (&list == &peer.cleared && ++fragments > kMostFragments) {
      has_more_ = true;
      return true;
    }
    if (!write_next(peer, list)) return moved;
    moved = true;
    empty = 0;
  }
  return moved;
}

// Writes the next frame of the first request in `list`; false if there is no room for it.
bool Mail::write_next(Peer& peer, Requests& list) noexcept {
  const Ticket request = list.begin();
  if (&list == &peer.queued) return write_first(peer, request);
  if (&list == &peer.cleared) return write_fragment(peer, request);
  Frame frame;
  frame.kind = &list == &peer.matched ? Frame::Kind::clearance : Frame::Kind::withdrawal;
  frame.id = request->id;
  if (!peer.out.write(frame, nullptr)) return false;
  if (frame.kind == Frame::Kind::clearance && !request->abandoned) {
    put(request, peer.receiving);
  } else {
    --pending_;
    list.erase(request);
  }
  return true;
}

bool Mail::write_first(Peer& peer, Ticket request) noexcept {
  const bool is_small = request->bytes <= most_small_;
  Frame frame = whole_message(request->bytes, request->tag);
  if (!is_small) {
    frame.kind = Frame::Kind::announcement;
    frame.payload = 0;
    frame.id = request->number;
  }
  if (!peer.out.write(frame, request->from)) return false;
  request->id = frame.id;
  if (is_small) {
    end(request);
  } else {
    put(request, peer.announced);
  }
  return true;
}

bool Mail::write_fragment(Peer& peer, Ticket request) noexcept {
  Frame frame;
  frame.kind = Frame::Kind::fragment;
  frame.payload =
      static_cast<std::uint32_t>(std::min(most_fragment_, request->bytes - request->moved));
  frame.id = request->id;
  if (!peer.out.write(frame, request->from + request->moved)) return false;
  request->moved += frame.payload;
  if (request->moved == request->bytes) end(request);
  return true;
}

// ---- Reading ----

bool Mail::read_from(Peer& peer) {
  bool moved = false;
  peer.in.look();
  for (const Frame* frame = peer.in.front(); frame != nullptr; frame = peer.in.front()) {
    switch (frame->kind) {
      case Frame::Kind::message:
      case Frame::Kind::announcement:
        read_message(peer, *frame);
        break;
      case Frame::Kind::clearance:
        read_clearance(peer, *frame);
        break;
      case Frame::Kind::fragment:
        read_fragment(peer, *frame);
        break;
      case Frame::Kind::withdrawal:
        read_withdrawal(peer, *frame);
        break;
    }
    moved = true;
  }
  return moved;
}

void Mail::read_message(Peer& peer, const Frame& frame) {
  const bool is_large = frame.kind == Frame::Kind::announcement;
  const Ticket receive = receive_for(peer, frame.tag);
  if (receive != any_posted_.end()) {
    check_size(*receive, peer.rank, frame.bytes);
    receive->source = peer.rank;
    receive->id = frame.id;
    peer.in.take(receive->into);
    if (is_large) return put(receive, peer.matched);
    return end(receive);
  }
  Arrived message{++arrivals_, frame.tag, frame.bytes, frame.id, nullptr};
  if (frame.payload > 0) message.payload = std::make_unique<std::byte[]>(frame.payload);
  std::byte* into = message.payload.get();
  peer.arrived.push_back(std::move(message));
  peer.in.take(into);  // last: the allocations above may throw
}

// The clearance of a cancelled send is dropped.
void Mail::read_clearance(Peer& peer, const Frame& frame) {
  const Ticket send = find_id(peer.announced, frame.id);
  peer.in.take(nullptr);
  if (send != peer.announced.end()) put(send, peer.cleared);
}

// Fragments of a cancelled receive are dropped.
void Mail::read_fragment(Peer& peer, const Frame& frame) {
  const Ticket receive = find_id(peer.receiving, frame.id);
  if (receive == peer.receiving.end()) return peer.in.take(nullptr);
  const std::size_t bytes = frame.payload;
  peer.in.take(receive->into + receive->moved);
  receive->moved += bytes;
  if (receive->moved == receive->bytes) end(receive);
}

// A receive that had taken the message waits for another, as if it had not.
void Mail::read_withdrawal(Peer& peer, const Frame& frame) {
  const auto arrived = find_id(peer.arrived, frame.id);
  if (arrived != peer.arrived.end()) peer.arrived.erase(arrived);
  for (Requests* list : {&peer.matched, &peer.receiving}) {
    const Ticket receive = find_id(*list, frame.id);
    if (receive == list->end()) continue;
    if (receive->abandoned) {
      --pending_;
      list->erase(receive);
      continue;
    }
    const std::optional<Found> another = arrived_for(*receive);
    receive->source = kAnySource;
    receive->id = 0;
    receive->moved = 0;
    if (another) {
      take_arrived(receive, *another);
    } else {
      post(receive);
    }
  }
  peer.in.take(nullptr);
}

// ---- Matching ----

Mail::Ticket Mail::receive_for(Peer& peer, std::int64_t tag) {
  const auto takes = [tag](const Request& receive) { return receive.tag == tag; };
  const Ticket from_it = find(peer.posted, takes);
  const Ticket from_any = find(any_posted_, takes);
  const bool is_any = from_it == peer.posted.end() ||
                      (from_any != any_posted_.end() && from_any->number < from_it->number);
  return is_any ? from_any : from_it;
}

std::optional<Mail::Found> Mail::arrived_for(const Request& receive) {
  std::optional<Found> first;
  for (Peer& peer : peers_) {
    if (receive.peer != kAnySource && receive.peer != peer.rank) continue;
    const auto message =
        find(peer.arrived, [&](const Arrived& arrived) { return arrived.tag == receive.tag; });
    if (message == peer.arrived.end()) continue;
    if (!first || message->arrival < first->second->arrival) first = {&peer, message};
  }
  if (first) check_size(receive, first->first->rank, first->second->bytes);
  return first;
}

void Mail::take_arrived(Ticket receive, const Found& found) {
  const auto [peer, message] = found;
  receive->source = peer->rank;
  receive->id = message->id;
  if (message->id != 0) {
    put(receive, peer->matched);
  } else {
    if (message->bytes > 0) copy_bytes(receive->into, message->payload.get(), message->bytes);
    end(receive);
  }
  peer->arrived.erase(message);
}

// Receives take messages in the order in which they were started.
void Mail::post(Ticket receive) {
  Requests& list = receive->peer == kAnySource ? any_posted_ : peer(receive->peer).posted;
  auto before = list.end();
  while (before != list.begin() && std::prev(before)->number > receive->number) --before;
  list.splice(before, *receive->list, receive);
  receive->list = &list;
}

void Mail::check_size(const Request& receive, int source, std::uint64_t bytes) const {
  if (receive.bytes == bytes) return;
  group_.throw_mismatch(group_.who(source) + " sent " + std::to_string(bytes) + " bytes with tag " +
                            std::to_string(receive.tag) + " to " + group_.who(group_.rank()) +
                            ", which called " + group_.describe(call_of(receive)) +
                            "; a receive must name the size of its message",
                        call_of(receive));
}

}  // namespace shardcomm
