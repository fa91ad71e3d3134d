// The way from one rank to another for messages: a ring of frames in memory that both see. One rank
// writes, and the other reads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/doorbell.h"
#include "comm/filler.h"

namespace shardcomm {

// A frame is this head, and then `payload` bytes. Frames begin at multiples of kAlign.
struct Frame {
  enum class Kind : std::uint32_t {
    message,       // all of a small message
    announcement,  // a large message, whose bytes wait for a clearance
    clearance,     // from its receiver: the bytes of `id` may come
    fragment,      // the next bytes of `id`
    withdrawal     // there will be no more of `id`: its sender has cancelled it
  };
  static constexpr std::size_t kAlign = 64;  // a small message is one cache line

  Kind kind = Kind::message;
  std::uint32_t payload = 0;
  std::int64_t tag = 0;     // of a message, or an announcement
  std::uint64_t bytes = 0;  // of the whole message; the same
  std::uint64_t id = 0;     // of a large message: its number among those of its sender
};

// Fresh memory, which is zero, is an empty ring. Pages that no frame has come to cost nothing.
struct MailRing {
  alignas(64) Atomic<std::uint64_t> written;  // bytes, ever, by the one that writes
  Atomic<std::uint32_t> starved;              // 1: it waits for room
  alignas(64) Atomic<std::uint64_t> read;     // bytes, ever, by the one that reads
  alignas(64) std::byte data[Frame::kAlign];  // `capacity` bytes, a power of two

  static std::size_t bytes(std::size_t capacity) {
    return sizeof(MailRing) - Frame::kAlign + capacity;
  }
};

// One rank's end of the way to another, whose bell it rings.
class MailWriter {
 public:
  MailWriter() = default;
  MailWriter(MailRing* ring, std::size_t capacity, Doorbell* bell)
      : ring_(ring), capacity_(capacity), bell_(bell) {}

  // Writes a frame with the `frame.payload` bytes at `payload`. False: there is no room, and the
  // one that reads rings when there is more.
  bool write(const Frame& frame, const std::byte* payload);
  // Any thread may ask. Changes when there may be room for a frame that had none.
  std::uint64_t activity() const;

 private:
  bool has_room(std::size_t bytes);

  MailRing* ring_ = nullptr;
  std::size_t capacity_ = 0;
  Doorbell* bell_ = nullptr;
  Filler filler_;
  std::uint64_t written_ = 0;
  std::uint64_t read_ = 0;  // as last seen
};

// The other end, whose reader rings the bell of the one that writes.
class MailReader {
 public:
  MailReader() = default;
  MailReader(MailRing* ring, std::size_t capacity, Doorbell* bell)
      : ring_(ring), capacity_(capacity), bell_(bell) {}

  // Looks how much was written. `front` tells only of frames that were there at the last look.
  // Sequentially consistent, as are all looks of one that has armed its bell: the other stores, and
  // then looks at the bell. An acquire could be made before the bell is armed.
  void look() { written_ = ring_->written.load(); }
  // The first frame that was not taken; null if there is none. It is valid until it is taken.
  const Frame* front() const;
  // Copies the first frame's payload, unless `into` is null, and lets go of the frame.
  void take(std::byte* into);
  // Any thread may ask. Changes when there are more frames.
  std::uint64_t activity() const { return ring_->written.load(); }

 private:
  MailRing* ring_ = nullptr;
  std::size_t capacity_ = 0;
  Doorbell* bell_ = nullptr;
  std::uint64_t read_ = 0;
  std::uint64_t written_ = 0;  // as last seen
};

}  // namespace shardcomm
