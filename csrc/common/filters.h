// How a row draws its token, and top-k, top-p and min-p over a few values, for host and device: every value is compared
// with every other, so that there is nothing to sort. The rules are those of select_tokens, with the same bits.
#pragma once
#include "common/noise.h"

namespace dflash {

// score = sharpness * z + noise with z = logit / temperature; greedy: score = logit.
struct Draw {
  float temperature, sharpness;
  bool greedy;
};

DFLASH_HOST_DEVICE Draw draw_of(float temperature, float sharpness) {
  constexpr float kLargest = 3.4028234663852886e38f;
  return {temperature > kLargest ? kLargest : temperature, sharpness >= 0.0f ? sharpness : 0.0f,
          !(temperature > 0.0f) || sharpness == __builtin_inff()};
}

// sharpness * z; infinite z stay, whatever the sharpness.
DFLASH_HOST_DEVICE float sharpened(const Draw& draw, float z) {
  return bit_cast<uint32_t>(z) << 1 == 0xff000000u ? z : DFLASH_MUL32(draw.sharpness, z);
}

// z - top; the largest logit gives 0 even if it is infinite.
DFLASH_HOST_DEVICE float below_top(float z, float top) { return z == top ? 0.0f : z - top; }

struct Filters {
  int64_t top_k;
  float top_p, min_p;
};

DFLASH_HOST_DEVICE bool any_filter(const Filters& f) { return f.top_k > 0 || f.top_p < 1.0f || f.min_p > 0.0f; }

// The fixed-point weight exp(z[i] - top) of a value that top-k keeps, -1 of another. Values of -inf are none.
DFLASH_HOST_DEVICE int64_t weight_in_top_k(const float* z, int count, int i, float top, const Filters& f) {
  int64_t greater = 0;
  if (f.top_k > 0)
    for (int j = 0; j < count; ++j) greater += z[j] > z[i];
  return f.top_k > 0 && greater >= f.top_k ? -1 : fixed_point(shared_exp(below_top(z[i], top)));
}

// Does a value stay? `weight` holds weight_in_top_k of all. The largest always does.
DFLASH_HOST_DEVICE bool is_kept(const float* z, const int64_t* weight, int count, int i, float top, const Filters& f) {
  if (z[i] == top) return true;
  if (weight[i] < 0 || (f.min_p > 0.0f && !(shared_exp(z[i] - top) >= f.min_p))) return false;
  if (!(f.top_p < 1.0f)) return true;
  int64_t above = 0, total = 0;
  for (int j = 0; j < count; ++j) {
    const int64_t own = weight[j] > 0 ? weight[j] : 0;
    total += own;
    above += z[j] > z[i] ? own : 0;
  }
  return double(above) < DFLASH_MUL64(double(f.top_p), double(total));
}

}  // namespace dflash
