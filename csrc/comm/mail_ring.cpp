#include "comm/mail_ring.h"

#include <algorithm>
#include <cstring>

#include "copy/copy_bytes.h"

namespace shardcomm {
namespace {

static_assert(Frame::kAlign % alignof(Frame) == 0 && sizeof(Frame) <= Frame::kAlign);

std::size_t length(std::size_t payload) {
  return (sizeof(Frame) + payload + Frame::kAlign - 1) / Frame::kAlign * Frame::kAlign;
}

// Calls part(place in the ring, bytes before it, bytes) for the bytes from `position` on: once, or
// twice where they go on at the ring's beginning.
template <class Part>
void in_parts(std::uint64_t position, std::size_t bytes, std::size_t capacity, Part&& part) {
  const auto at = static_cast<std::size_t>(position % capacity);
  const std::size_t first = std::min(bytes, capacity - at);
  if (first > 0) part(at, 0, first);
  if (first < bytes) part(0, first, bytes - first);
}

}  // namespace

bool MailWriter::write(const Frame& frame, const std::byte* payload) {
  const std::size_t bytes = length(frame.payload);
  if (!has_room(bytes)) return false;
  std::memcpy(ring_->data + written_ % capacity_, &frame, sizeof(frame));
  in_parts(written_ + sizeof(frame), frame.payload, capacity_,
           [&](std::size_t at, std::size_t done, std::size_t part) {
             filler_.copy(ring_->data + at, payload + done, part);
           });
  written_ += bytes;
  ring_->written.store(written_);  // before the look at the bell
  bell_->ring();
  return true;
}

// A reader that frees room before it can see that this starves has freed it before the second look.
bool MailWriter::has_room(std::size_t bytes) {
  const auto fits = [&] { return written_ + bytes - read_ <= capacity_; };
  if (fits()) return true;
  read_ =
      ring_->read.load(std::memory_order_acquire);  // its reads are done before it is written to
  if (!fits()) {
    ring_->starved.store(1);
    read_ = ring_->read.load();
    if (!fits()) return false;
  }
  ring_->starved.store(0, std::memory_order_relaxed);  // seen late: the reader rings for nothing
  return true;
}

std::uint64_t MailWriter::activity() const {
  // This rank's threads alone write it, and the one that armed the bell has seen the latest.
  const bool starved = ring_->starved.load(std::memory_order_relaxed) != 0;
  return starved ? ring_->read.load() : 0;
}

const Frame* MailReader::front() const {
  if (written_ == read_) return nullptr;
  return reinterpret_cast<const Frame*>(ring_->data + read_ % capacity_);
}

void MailReader::take(std::byte* into) {
  const Frame& frame = *front();
  if (into != nullptr) {
    in_parts(read_ + sizeof(frame), frame.payload, capacity_,
             [&](std::size_t at, std::size_t done, std::size_t part) {
               copy_bytes(into + done, ring_->data + at, part);
             });
  }
  read_ += length(frame.payload);
  ring_->read.store(read_);  // before the look at what the writer waits for
  if (ring_->starved.load() != 0) bell_->ring();
}

}  // namespace shardcomm
