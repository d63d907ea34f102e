// Submitted work waits in its stream, as on a card, and runs when the host waits for it, or before, as a seed says: at each
// call, none or some of what waits in any stream. $WGRAD_EMULATED_SEED is a number, or "late": nothing runs before
// somebody waits for it. With HIP_LAUNCH_BLOCKING=1 a launch waits for itself.
#include "queue.hpp"

#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulator {
namespace {

std::vector<Stream*> streams;
int sticky = SUCCESS;
std::string failure;
constexpr size_t MOST_WAITING = 4096;
constexpr int GLOBAL = 0, THREAD_LOCAL = 1;  // hipStreamCaptureMode; 2, relaxed, forbids no other call

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) * 1e3 + double(t.tv_nsec) * 1e-6;
}

std::string seed() {
  const char* text = getenv("WGRAD_EMULATED_SEED");
  return text ? text : "0";
}

// xorshift64*, begun anew when the seed is another one.
unsigned random_below(unsigned bound) {
  static std::string of;
  static uint64_t state = 0;
  if (std::string wanted = seed(); of != wanted || !state) {
    of = wanted;
    state = strtoull(wanted.c_str(), nullptr, 10) * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du;
  }
  state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
  return unsigned((state * 0x2545f4914f6cdd1du) >> 33) % bound;
}

void run_first(Stream* stream) {
  Work work = std::move(stream->waiting.front());
  stream->waiting.pop_front();
  if (!sticky) work();
}

// What a card may have done meanwhile. Stretches in which it keeps up with the host take turns with others.
void drift() {
  constexpr unsigned ODDS[] = {0, 3, 7};  // of 8: that one more piece of work runs now
  static unsigned left = 0, odds = 0;
  if (seed() == "late") return;
  if (!left) left = 1 + random_below(64), odds = ODDS[random_below(3)];
  left--;
  while (random_below(8) < odds) {
    std::vector<Stream*> busy;
    std::copy_if(streams.begin(), streams.end(), std::back_inserter(busy), [](Stream* s) { return !s->waiting.empty(); });
    if (busy.empty()) return;
    run_first(busy[random_below(unsigned(busy.size()))]);
  }
}

// A call that a capture does not allow: the capture is over, and its end says so.
int forbidden(Stream* stream) {
  stream->invalidated = true;
  return CAPTURE_UNSUPPORTED;
}

}  // namespace

int lost() { return sticky; }
const std::string& last_failure() { return failure; }

void fault(const std::string& what, bool illegal) {
  failure = what;
  fprintf(stderr, "emulator: %s\n", what.c_str());
  const char* text = getenv("WGRAD_EMULATED_FAULTS");
  if (!text || strcmp(text, "report")) abort();
  sticky = illegal ? ILLEGAL_ADDRESS : LAUNCH_FAILURE;
}

void clear() {
  sticky = SUCCESS, failure.clear();
  for (Stream* stream : streams) stream->waiting.clear();
}

int submit(Stream* stream, Work work) {
  if (sticky) return sticky;
  if (!stream) return INVALID_HANDLE;  // the null stream waits for the others in ways of its own: not emulated
  if (stream->capturing) {
    if (stream->invalidated) return CAPTURE_INVALIDATED;
    stream->capturing->nodes.push_back(std::move(work));
    return SUCCESS;
  }
  stream->waiting.push_back(std::move(work));
  if (stream->waiting.size() > MOST_WAITING) run_first(stream);
  drift();
  return SUCCESS;
}

int finish(Stream* stream) {
  if (!stream) return INVALID_HANDLE;
  if (stream->capturing) return forbidden(stream);
  while (!stream->waiting.empty()) run_first(stream);
  return sticky;
}

int finish_all() {
  for (Stream* stream : streams)
    if (int error = finish(stream)) return error;
  return sticky;
}

int unsafe() {
  drift();
  for (Stream* stream : streams) {
    bool here = stream->mode == THREAD_LOCAL && stream->by == std::this_thread::get_id();
    if (stream->capturing && (stream->mode == GLOBAL || here)) return forbidden(stream);
  }
  return sticky;
}

int record(Event* event, Stream* stream) {
  if (!stream) return INVALID_HANDLE;
  auto mark = event->mark = std::make_shared<Mark>(Mark{stream, stream->capturing != nullptr});
  return submit(stream, [mark] { mark->reached = true, mark->milliseconds = now(); });
}

int wait_for(const Event* event) {
  const Mark* mark = event->mark.get();
  if (sticky || !mark) return sticky;
  if (mark->captured) return CAPTURED_EVENT;
  while (!mark->reached && !mark->stream->waiting.empty()) run_first(mark->stream);
  return sticky;
}

int query(const Event* event) {
  const Mark* mark = event->mark.get();
  if (sticky || !mark) return sticky;
  if (mark->captured) return CAPTURED_EVENT;
  // A host that asks again and again gets there.
  if (!mark->reached && seed() != "late" && !mark->stream->waiting.empty()) run_first(mark->stream);
  return sticky ? sticky : mark->reached ? SUCCESS : NOT_READY;
}

int query(Stream* stream) {
  if (!stream) return INVALID_HANDLE;
  if (stream->capturing) return forbidden(stream);
  if (!sticky && !stream->waiting.empty()) run_first(stream);  // who asks again and again waits
  return sticky ? sticky : stream->waiting.empty() ? SUCCESS : NOT_READY;
}

int begin_capture(Stream* stream, int mode) {
  if (!stream) return CAPTURE_UNSUPPORTED;
  if (stream->capturing) return ILLEGAL_STATE;
  stream->capturing = new Graph, stream->mode = mode, stream->invalidated = false, stream->by = std::this_thread::get_id();
  return sticky;
}

int end_capture(Stream* stream, Graph** graph) {
  if (!stream || !stream->capturing) return ILLEGAL_STATE;
  Graph* made = stream->capturing;
  stream->capturing = nullptr;
  if (stream->invalidated) return delete made, *graph = nullptr, CAPTURE_INVALIDATED;
  return *graph = made, sticky;
}

Stream* create_stream() { return streams.emplace_back(new Stream); }

void destroy_stream(Stream* stream) {
  finish(stream);
  streams.erase(std::find(streams.begin(), streams.end(), stream));
  delete stream;
}

}  // namespace emulator
