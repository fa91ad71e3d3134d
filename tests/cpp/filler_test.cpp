// Filler copies what memcpy would, by either way; CopyRates chooses the faster way, whatever a
// single copy took.
#include "comm/filler.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "copy/copy_bytes.h"

namespace {

using namespace shardcomm;

void require(bool condition, const char* claim) {
  if (condition) return;
  std::fprintf(stderr, "not true: %s\n", claim);
  std::exit(1);
}

// So many copies that each way is tried several times, at every place in a line, with nothing else
// touched.
void copies_are_whole() {
  constexpr unsigned kSeed = 3;
  std::printf("seed %u\n", kSeed);
  std::mt19937 random(kSeed);
  const std::vector<std::size_t> lengths{0, 1, 63, 8191, 8192, 8193, 70001, (1 << 20) + 65};
  for (const std::size_t length : lengths) {
    Filler filler;
    std::vector<unsigned char> source(length + 64);
    const int rounds = length > 100000 ? 5 : 140;
    for (int round = 0; round < rounds; ++round) {
      for (unsigned char& byte : source) byte = static_cast<unsigned char>(random());
      const auto from = static_cast<std::ptrdiff_t>(random() % 64);
      const auto to = static_cast<std::ptrdiff_t>(random() % 64);
      std::vector<unsigned char> destination(length + 64, 7), wanted = destination;
      std::copy_n(source.begin() + from, length, wanted.begin() + to);
      filler.copy(destination.data() + to, source.data() + from, length);
      require(destination == wanted, "a copy is whole, and touches nothing else");
    }
  }
  Filler{}.copy(nullptr, nullptr, 0);
}

void copies_past_caches_are_whole() {
  std::vector<unsigned char> source(300);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<unsigned char>(i);
  for (std::size_t length = 0; length <= 200; ++length) {
    for (std::size_t place = 0; place < 64; ++place) {
      std::vector<unsigned char> destination(300, 7), wanted = destination;
      std::copy_n(source.data() + 3, length, wanted.data() + place);
      copy_past_caches(destination.data() + place, source.data() + 3, length);
      require(destination == wanted, "a copy past the caches is whole, and touches nothing else");
    }
  }
}

// How many of `copies` went past the caches, where each way takes its time.
int past_caches_of(CopyRates& rates, int copies, double ordinary, double past_caches) {
  int past = 0;
  for (int i = 0; i < copies; ++i) {
    const bool way = rates.past_caches();
    past += way ? 1 : 0;
    rates.took(way, way ? past_caches : ordinary);
  }
  return past;
}

void the_faster_way_is_taken() {
  constexpr int kTries = CopyRates::kTries;
  CopyRates far;
  require(past_caches_of(far, 4, 10, 1.5) == 2, "each way is tried twice at first");
  require(past_caches_of(far, 10 * kTries, 10, 1.5) == 10 * (kTries - 1),
          "one of so many copies goes the slower way");
  CopyRates near;
  past_caches_of(near, 4, 1.2, 1.6);
  require(past_caches_of(near, 10 * kTries, 1.2, 1.6) == 10, "near cores store in order");
  past_caches_of(near, 2 * kTries, 10, 1.5);
  require(past_caches_of(near, kTries, 10, 1.5) == kTries - 1, "it follows when cores become far");
  past_caches_of(near, 2 * kTries, 1.2, 1.6);
  require(past_caches_of(near, kTries, 1.2, 1.6) == 1, "it follows when cores become near");
  CopyRates hardly;
  past_caches_of(hardly, 4, 1.4, 1);
  require(past_caches_of(hardly, kTries, 1.4, 1) == 1, "the gain has to be clear");
}

void one_slow_copy_changes_nothing() {
  CopyRates rates;
  past_caches_of(rates, 10, 1.2, 1.6);
  require(!rates.past_caches(), "the faster way before");
  rates.took(false, 1000);
  require(!rates.past_caches(), "the faster way after a copy in which the rank was stopped");
  CopyRates first;
  first.took(false, 500);  // pages that are touched for the first time
  first.took(true, 900);
  first.took(false, 10);
  first.took(true, 1.5);
  require(first.past_caches(), "the first copies do not count where later ones are faster");
}

}  // namespace

int main() {
  copies_are_whole();
  copies_past_caches_are_whole();
  the_faster_way_is_taken();
  one_slow_copy_changes_nothing();
  return 0;
}
