// A doorbell, by which a sleeping rank learns that another rank, or another thread of its own, has
// done something that it may wait for. It lies in memory that all ranks see.
#pragma once

#include <cstdint>

#include "stream/futex.h"

namespace shardcomm {

// Who waits arms the bell, looks whether there is something, and then sleeps while `rung` has not
// changed since before the look. Who does something rings after that. So either the one that waits
// finds it, or the bell is rung: if what is done, the look for it, and all accesses to the bell are
// sequentially consistent. Weaker orders let a load pass an earlier store to another word.
struct alignas(64) Doorbell {
  Atomic<std::uint32_t> rung;   // how often, modulo 2^32; also the futex
  Atomic<std::uint32_t> armed;  // 1: somebody sleeps, or is about to; its own rank alone sets it

  void ring() noexcept {
    if (armed.load() != 0) wake();
  }
  void wake() noexcept {
    rung.fetch_add(1);
    wake_all(rung);
  }
};

}  // namespace shardcomm
