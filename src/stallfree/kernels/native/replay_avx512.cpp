// The AVX-512 paths: F, BW, DQ and VL.
#include <immintrin.h>

#include "update.h"

namespace {

// m / (sqrt(v) root_scale + eps) as the instructions round it: the same bits as AVX2.
struct IEEE {
  const __m512 root_scale, eps;

  IEEE(float root_scale, float eps) : root_scale(_mm512_set1_ps(root_scale)), eps(_mm512_set1_ps(eps)) {}

  __m512 operator()(__m512 m, __m512 v) const {
    return _mm512_div_ps(m, _mm512_fmadd_ps(_mm512_sqrt_ps(v), root_scale, eps));
  }
};

// vsqrtps and vdivps share one unit, the bottleneck on most processors. Here the root takes a 14-bit estimate y of 1 / sqrt(v)
// and one Newton step on the multipliers instead: with s = v y and e = 1 - s y, sqrt(v) = s (1 + e / 2) up to 1.5 * 2^-28,
// relatively. The estimate's bits differ between makers of processors.
struct Estimate {
  const __m512 root_scale, half_root_scale, eps;

  Estimate(float root_scale, float eps)
      : root_scale(_mm512_set1_ps(root_scale)), half_root_scale(_mm512_set1_ps(0.5f * root_scale)), eps(_mm512_set1_ps(eps)) {}

  __m512 operator()(__m512 m, __m512 v) const {
    // y becomes finite at v = 0, so that s = 0, and 1 at infinity, so that the quotient is 0 as in torch. NaN goes through.
    const __m512i classes = _mm512_set1_epi32(0x00A00E00);  // zero -> the largest float, +infinity -> 1, others unchanged
    const __m512 y = _mm512_fixupimm_ps(_mm512_rsqrt14_ps(v), v, classes, 0);
    const __m512 s = _mm512_mul_ps(v, y);
    const __m512 e = _mm512_fnmadd_ps(s, y, _mm512_set1_ps(1.0f));
    const __m512 scale = _mm512_fmadd_ps(e, half_root_scale, root_scale);
    return _mm512_div_ps(m, _mm512_fmadd_ps(s, scale, eps));
  }
};

template <class Method>
struct AVX512 {
  using Quotient = Method;
  using Float = __m512;
  using Int = __m512i;
  static constexpr int width = 16;
  static constexpr int unroll = 2;

  struct All {};
  static All all_lanes() { return {}; }
  static __mmask16 first_lanes(int count) { return static_cast<__mmask16>((1u << count) - 1); }

  static Float zero() { return _mm512_setzero_ps(); }
  static Float set1(float x) { return _mm512_set1_ps(x); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float fnma(Float a, Float b, Float c) { return _mm512_fnmadd_ps(a, b, c); }

  static Int set1(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static Int add(Int a, Int b) { return _mm512_add_epi32(a, b); }
  static Int mul(Int a, Int b) { return _mm512_mullo_epi32(a, b); }
  static Int bit_and(Int a, Int b) { return _mm512_and_si512(a, b); }
  static Int bit_xor(Int a, Int b) { return _mm512_xor_si512(a, b); }
  template <int n> static Int shift_right(Int a) { return _mm512_srli_epi32(a, n); }
  static Int counting_from(uint32_t first) {
    return add(set1(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  }

  static Float load(const float* p, All) { return _mm512_loadu_ps(p); }
  static Float load(const float* p, __mmask16 k) { return _mm512_maskz_loadu_ps(k, p); }
  static Float load(const BF16* p, All) { return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Float load(const BF16* p, __mmask16 k) { return widen_bf16(_mm256_maskz_loadu_epi16(k, p)); }
  static Float load(const F16* p, All) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Float load(const F16* p, __mmask16 k) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(k, p)); }

  static void store(float* p, Float x, All) { _mm512_storeu_ps(p, x); }
  static void store(float* p, Float x, __mmask16 k) { _mm512_mask_storeu_ps(p, k, x); }
  template <class Lanes> static void store(BF16* p, Float x, Lanes lanes) {
    const Int odd = bit_and(shift_right<16>(_mm512_castps_si512(x)), set1(1u));
    store_stochastic(p, x, add(odd, set1(0x7fffu)), lanes);  // to the nearest, ties to even
  }
  template <class Lanes> static void store(F16* p, Float x, Lanes lanes) {
    store_half_words(p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), lanes);
  }

  // Adds `low`, below 2^16, to the bits of x and drops the lower half. NaN becomes 0x7fc0.
  template <class Lanes> static void store_stochastic(BF16* p, Float x, Int low, Lanes lanes) {
    const Int rounded = shift_right<16>(add(_mm512_castps_si512(x), low));
    const Int bits = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), set1(0x7fc0u));
    store_half_words(p, _mm512_cvtepi32_epi16(bits), lanes);
  }

 private:
  static Float widen_bf16(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
  static void store_half_words(void* p, __m256i x, All) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
  static void store_half_words(void* p, __m256i x, __mmask16 k) { _mm256_mask_storeu_epi16(p, k, x); }
};

}  // namespace

namespace stallfree {
const Table avx512_table = STALLFREE_TABLE(AVX512<IEEE>);
const Table avx512_rsqrt_table = STALLFREE_TABLE(AVX512<Estimate>);
}
