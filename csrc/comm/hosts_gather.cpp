// What gives all ranks of all hosts the same: all_gather, and the end of an all_reduce.
#include <algorithm>

#include "comm/buffer.h"
#include "comm/chunks.h"
#include "comm/hosts.h"
#include "copy/convert_cpu.h"
#include "copy/copy_bytes.h"
#include "shardcomm/tile.h"

namespace shardcomm {

void HostsCommunicator::run_all_gather(const void* send, DType send_dtype, void* recv,
                                       DType recv_dtype, const Parts& parts, std::int64_t tag,
                                       NativeStream) {
  Lane& lane = gathers_;
  Call call;
  call.op = Op::all_gather;
  call.send_dtype = send_dtype;
  call.recv_dtype = recv_dtype;
  call.count = parts.equal() ? parts.count(rank()) : parts.total(size());
  call.tag = tag;
  const std::size_t bytes = bytes_of(parts.total(size()), recv_dtype);
  call.recv = on_host_->place_of(recv, bytes, "all_gather: recv");
  perform(lane, call, parts, [&] {
    const bool in_window = on_host_->have_one_window(lane.channel);  // checked before it is written
    // Not before all ranks have come: they may still read what a window of all held.
    std::byte* own = at(recv, parts.begin(rank()), recv_dtype);
    convert_cpu(own, recv_dtype, send, send_dtype, parts.count(rank()));
    const bool greets = bytes_of(parts.longest(), recv_dtype) <= Hello::kRoom;
    start_greeting(lane, own, greets ? bytes_of(parts.count(rank()), recv_dtype) : 0);
    if (greets) finish_greeting(lane);
    gather_parts(lane, static_cast<std::byte*>(recv), recv_dtype, parts, in_window, greets);
  });
}

// Of each chunk, this rank gets the blocks of its own index from all hosts. Through the stage the
// ranks of the host give them to each other; into a window of all each writes them once.
void HostsCommunicator::gather_parts(Lane& lane, std::byte* recv, DType dtype, const Parts& parts,
                                     bool in_window, bool greeted) {
  // A slot has a block for each rank, also if the lane is that of reduces, whose own are more.
  const std::size_t room =
      std::min(kMostBlockBytes, lane.slot_bytes / static_cast<std::size_t>(size()) / 64 * 64);
  const Chunks chunks(parts, static_cast<std::int64_t>(room / itemsize(dtype)));
  const auto place = [&](int r, std::int64_t chunk) {
    return at(recv, chunks.begin(r, chunk), dtype);
  };
  // The blocks of one index lie one after another, as long as the longest.
  const auto block_bytes = [&](int i, std::int64_t chunk) {
    std::int64_t longest = 0;
    for (int host = 0; host < hosts_; ++host) {
      longest = std::max(longest, chunks.length(rank_at(host, i), chunk));
    }
    return bytes_of(longest, dtype);
  };
  const auto block = [&](int host, int i, std::int64_t chunk) {
    return lane.slot(chunk) +
           room * static_cast<std::size_t>(i) * static_cast<std::size_t>(hosts_) +
           block_bytes(i, chunk) * static_cast<std::size_t>(host);
  };
  const auto start_chunk = [&](std::int64_t chunk) {
    const std::size_t bytes = block_bytes(index(), chunk);
    if (greeted) {
      for (int host = 0; host < hosts_; ++host) {
        copy_bytes(block(host, index(), chunk), lane.hellos[static_cast<std::size_t>(host)].payload,
                   bytes);
      }
      return;
    }
    if (bytes == 0) return;
    std::byte* out = lane.out[static_cast<std::size_t>(chunk % kSlots)].of(bytes);
    copy_bytes(out, place(rank(), chunk), bytes_of(chunks.length(rank(), chunk), dtype));
    start(lane, chunk, [out, to = block(0, index(), chunk), bytes](Across& across, int channel) {
      across.all_gather(channel, out, to, bytes);
    });
  };
  const auto use_blocks_of = [&](int i, std::int64_t chunk) {
    for (int host = 0; host < hosts_; ++host) {
      const int r = rank_at(host, i);
      if (r == rank()) continue;
      copy_bytes(place(r, chunk), block(host, i, chunk), bytes_of(chunks.length(r, chunk), dtype));
    }
  };

  for (std::int64_t chunk = 0; chunk < std::min<std::int64_t>(chunks.number(), kSlots - 1);
       ++chunk) {
    start_chunk(chunk);
  }
  for (std::int64_t chunk = 0; chunk < chunks.number(); ++chunk) {
    finish(lane, chunk);
    // All have this chunk's blocks, so all have used the one before, whose slot is filled next.
    if (!in_window) on_host_->meet(lane.channel);
    if (chunk + kSlots - 1 < chunks.number()) start_chunk(chunk + kSlots - 1);
    for (int i = 0; i < local_; ++i) {
      if (i == index() || !in_window) use_blocks_of(i, chunk);
    }
  }
  if (in_window) on_host_->meet(lane.channel);  // all have written
}

}  // namespace shardcomm
