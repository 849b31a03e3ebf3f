// Which stream waits for which, as LaunchOrder orders launches and SlotPool the users of slots. Prints "right", or what
// was not.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "emulator.h"
#include "runtime/launch_order.h"
#include "runtime/slot_pool.h"

using hybrid_ep::LaunchOrder;
using hybrid_ep::SlotPool;

namespace {

using Stream = uintptr_t;
using Waits = std::vector<std::pair<Stream, Stream>>;  // the stream that waits, and what it waits for

Waits waits;
std::vector<std::pair<Stream, unsigned long long>> captures;  // streams and their captures

cudaStream_t handle_of(Stream stream) { return reinterpret_cast<cudaStream_t>(stream); }
Stream number_of(void* stream) { return reinterpret_cast<Stream>(stream); }

void launch(LaunchOrder& order, Stream stream) {
  order.begin(handle_of(stream));
  order.end();
}
void launch_low_latency(LaunchOrder& order, Stream stream) {
  order.begin_low_latency(handle_of(stream));
  order.end();
}

// Checks which streams have waited since the last check, and how many events were recorded.
void expect(const Waits& wanted, int num_records, const char* what) {
  const bool is_right = waits == wanted && emulated::num_records == num_records;
  if (!is_right) {
    std::printf("%s:", what);
    for (const auto& [stream, other] : waits) std::printf(" %zu waits for %zu", stream, other);
    std::printf(", %d events recorded\n", static_cast<int>(emulated::num_records));
    std::exit(1);
  }
  waits.clear();
  emulated::num_records = 0;
}

void check_streams() {
  LaunchOrder order(0);
  for (int i = 0; i < 3; ++i) launch(order, 1);
  expect({}, 0, "launches on one stream cost nothing");
  launch(order, 2);
  expect({{2, 1}}, 2, "the first launch on another stream waits for the stream before");
  launch(order, 2);
  expect({}, 1, "each launch is followed by an event from then on");
  launch(order, 1);
  expect({{1, 2}}, 1, "a launch on another stream waits for the event of the last launch");
  order.begin(handle_of(1));  // and an error, so that no event follows
  launch(order, 2);
  expect({{2, 1}}, 2, "a launch that failed has no event");
}

void check_captures() {
  LaunchOrder order(0);
  captures = {{2, 7}, {3, 7}, {4, 8}};
  launch(order, 1);
  launch(order, 2);
  expect({}, 0, "a capture does not wait for work outside");
  launch(order, 3);
  expect({{3, 2}}, 1, "streams of a capture wait for each other");
  launch(order, 4);
  expect({}, 0, "captures do not wait for each other");
  launch(order, 1);
  expect({}, 1, "nothing outside waits for a capture");
  captures.clear();
  launch(order, 4);
  expect({{4, 1}}, 1, "a stream whose capture has ended is as any other");
}

void check_low_latency() {
  auto one = std::make_unique<LaunchOrder>(0);
  LaunchOrder other(0), elsewhere(1);
  launch_low_latency(*one, 1);
  launch_low_latency(elsewhere, 5);
  launch_low_latency(other, 2);
  launch_low_latency(other, 2);
  expect({{2, 1}}, 1, "low-latency launches wait for those of another buffer of the GPU");
  launch_low_latency(*one, 1);
  expect({{1, 2}}, 2, "and for those that come back");
  launch(*one, 3);
  launch_low_latency(other, 2);
  expect({{3, 1}, {2, 3}}, 2, "they wait for the last launch of the other buffer, whatever it is");
  launch(*one, 3);
  launch_low_latency(other, 2);
  expect({}, 2, "other launches are not ordered between buffers");
  launch_low_latency(*one, 3);
  expect({{3, 2}}, 1, "they wait for the last launch of the buffer that had the last low-latency launch");
  one.reset();
  launch_low_latency(other, 2);
  expect({}, 1, "a buffer that is gone holds nobody back");
}

void check_slots() {
  Stream current = 1;
  SlotPool pool(2, 0, [&] { return std::optional(handle_of(current)); });
  const auto take = [&](Stream stream) { return pool.take(handle_of(stream)).slot_idx; };
  int slot = take(1);
  expect({}, 0, "nobody waits for a slot that was never used");
  current = 2;
  pool.release(slot);
  expect({}, 2, "a result that dies under another stream than its dispatch's ends on both");
  slot = take(3);
  expect({{3, 1}, {3, 2}}, 0, "the next user of the slot waits for both");
  current = 3;
  pool.release(slot);
  slot = take(4);
  expect({{4, 3}}, 1, "one stream has one event");
  pool.record_stream(slot, handle_of(5));
  pool.record_stream(slot, handle_of(4));
  current = 6;
  pool.release(slot);
  slot = take(4);
  expect({{4, 4}, {4, 5}, {4, 6}}, 3, "the next user waits for all streams that have used the slot");
  current = 4;
  pool.release(slot);
  slot = take(6);
  expect({{6, 4}}, 1, "streams of an earlier result are forgotten");
}

}  // namespace

int main() {
  emulated::on_wait = [](void* stream, void* recorded_on) {
    waits.emplace_back(number_of(stream), number_of(recorded_on));
  };
  emulated::capture_of = [](void* stream) -> unsigned long long {
    for (const auto& [captured, id] : captures) {
      if (captured == number_of(stream)) return id;
    }
    return 0;
  };
  check_streams();
  check_captures();
  check_low_latency();
  check_slots();
  std::puts("right");
}
