/* BLAKE2b (RFC 7693) of at most one block, unkeyed: what the chain of a log needs once per batch, without an object of
   hashlib and its lock for each. */

#include <stdint.h>
#include <string.h>

#define BLAKE2B_BLOCK 128

static const uint64_t blake2b_iv[8] = {
    0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu, 0xa54ff53a5f1d36f1u,
    0x510e527fade682d1u, 0x9b05688c2b3e6c1fu, 0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u,
};

static const uint8_t blake2b_sigma[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static inline uint64_t blake2b_rotate(uint64_t v, int n) { return v >> n | v << (64 - n); }

static inline void blake2b_mix(uint64_t *v, int a, int b, int c, int d, uint64_t x, uint64_t y) {
    v[a] += v[b] + x;
    v[d] = blake2b_rotate(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = blake2b_rotate(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = blake2b_rotate(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = blake2b_rotate(v[b] ^ v[c], 63);
}

/* The first eight of `size` bytes of the digest, at `out`; 8 <= size <= 64 and n <= BLAKE2B_BLOCK. */
static void blake2b_short(uint8_t *out, int size, const uint8_t *data, size_t n) {
    uint8_t block[BLAKE2B_BLOCK] = {0};
    uint64_t v[16], m[16];
    uint64_t first = blake2b_iv[0] ^ 0x01010000u ^ (uint64_t)size;
    memcpy(block, data, n);
    for (int i = 0; i < 16; i++) {
        m[i] = 0;
        for (int byte = 7; byte >= 0; byte--) m[i] = m[i] << 8 | block[8 * i + byte];
    }
    memcpy(v, blake2b_iv, sizeof blake2b_iv);
    memcpy(v + 8, blake2b_iv, sizeof blake2b_iv);
    v[0] = first;
    v[12] ^= n;
    v[14] = ~v[14];  /* the last block */
    for (int round = 0; round < 12; round++) {
        const uint8_t *s = blake2b_sigma[round % 10];
        for (int i = 0; i < 4; i++)
            blake2b_mix(v, i, i + 4, i + 8, i + 12, m[s[2 * i]], m[s[2 * i + 1]]);
        for (int i = 0; i < 4; i++)
            blake2b_mix(v, i, (i + 1) % 4 + 4, (i + 2) % 4 + 8, (i + 3) % 4 + 12, m[s[8 + 2 * i]], m[s[9 + 2 * i]]);
    }
    first ^= v[0] ^ v[8];
    for (int byte = 0; byte < 8; byte++) out[byte] = (uint8_t)(first >> 8 * byte);
}
