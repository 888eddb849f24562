/* pre_tokenizers.h - the pre-tokenizers of byte-level BPE, shared by moe.c and moe-convert.
 *
 * Before BPE, the model's pre-tokenizer cuts text into pieces such as words, numbers and runs of blanks. No token spans
 * two pieces. It is a list of expressions; each one cuts every piece of the one before it into its matches and the gaps
 * between them. This file is data: one row per pre-tokenizer, with its names in GGUF files, the expressions that moe
 * compiles, and the expressions in tokenizer.json by which moe-convert recognizes it.
 *
 * The expressions for moe (expr) are those of the models' tokenizer.json, rewritten for PCRE2. None repeats a group but
 * possessively, so that matching needs no stack that grows with the text. None takes more than linear time on a long run,
 * which is why DeepSeek's expression for blanks at the end has a look-behind. Characters above 0x7f are written as numbers
 * where two of them look the same. Names are llama.cpp's. The defaults are llama.cpp's too, but for NFC, which it does not
 * know: that is what the models' tokenizer.json says.
 */
#ifndef CONVERT_PRE_TOKENIZERS_H
#define CONVERT_PRE_TOKENIZERS_H

#include <stdbool.h>

enum { VOCAB_MAX_EXPRS = 6 }; /* expressions of one pre-tokenizer */

/* ---- for PCRE2 ---- */

/* White space as in the \s of Unicode, Rust and Oniguruma, for use inside a class. PCRE2's \s also has U+180E. */
#define WS             "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define BLANKS         "[" WS "]+(?![^" WS "])|[" WS "]+"
#define LINES_BLANKS   "[" WS "]*[\\r\\n]+|" BLANKS
#define CONTRACTION    "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define WORD_PREFIX    "[^\\r\\n\\p{L}\\p{N}]?"
#define SYMBOLS        " ?[^" WS "\\p{L}\\p{N}]+"
#define GPT2           "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+|" SYMBOLS "|" BLANKS
#define QWEN2          CONTRACTION "|" WORD_PREFIX "\\p{L}+|\\p{N}|" SYMBOLS "[\\r\\n]*|" LINES_BLANKS
#define LLAMA3         CONTRACTION "|" WORD_PREFIX "\\p{L}+|\\p{N}{1,3}|" SYMBOLS "[\\r\\n]*|" LINES_BLANKS
#define CASED(UP, LOW) WORD_PREFIX UP "*" LOW "+" CONTRACTION "?|" WORD_PREFIX UP "+" LOW "*" CONTRACTION "?"
#define DEEPSEEK_WORDS \
    "[!-/:-@\\[-`{-~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|" LINES_BLANKS
#define TEKKEN \
    WORD_PREFIX UPPER "*" LOWER "+|" WORD_PREFIX UPPER "+" LOWER "*|\\p{N}|" SYMBOLS "[\\r\\n/]*|" LINES_BLANKS

/* A run of line ends (\r\n or \n) and what follows it up to the next run. */
#define LINE_RUNS "(?s).+?(?=(?<![\\r\\n])\\n|(?<!\\n)\\r\\n|\\z)"

/* For CASED: letters in upper or title case or without case, and letters in lower case or without case. Kimi excludes
 * Han characters, which a PCRE2 class can only say as the complement of everything else. */
#define UPPER      "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER      "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define UPPER_XHAN "[^\\p{Ll}\\p{N}\\p{P}\\p{S}\\p{Z}\\p{C}\\p{sc:Han}]"
#define LOWER_XHAN "[^\\p{Lu}\\p{Lt}\\p{N}\\p{P}\\p{S}\\p{Z}\\p{C}\\p{sc:Han}]"

/* clang-format off */
/* The letters with case, as DeepSeek's first tokenizer lists them. */
#define DEEPSEEK_LETTERS \
    "A-Za-z\\x{b5}À-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿ\\x{386}Έ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅ" \
    "Ὀ-Ὅὐ-ὗὙὛὝὟ-\\x{1f7d}ᾀ-ᾴᾶ-ᾼ\\x{1fbe}ῂ-ῄῆ-ῌῐ-\\x{1fd3}ῖ-\\x{1fdb}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\\x{2126}ℨ" \
    "\\x{212a}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
#define DEEPSEEK_MARKS "!-/:-~\\x{ff01}-\\x{ff0f}\\x{ff1a}-\\x{ff5e}\\x{2018}-\\x{201f}\\x{3000}-\\x{3002}"
#define DEEPSEEK_CJK   "[\\x{800}-\\x{9fa5}\\x{ac00}-\\x{d7ff}]+"

/* ---- as in tokenizer.json, with line ends as escapes and contractions in their short form ----
 *
 * Each match is a piece. Behind HF_WITH_NEXT, each match and what follows it is a piece (MergedWithNext). */

#define HF_WITH_NEXT " with what follows"

#define HF_SPACES  "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define HF_LETTERS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
#define HF_OTHERS  "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*" HF_SPACES
#define HF_UPPER   "\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}"
#define HF_LOWER   "\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}"
#define HF_GPT2    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define HF_CASED(up, lo) \
    "[^\\r\\n\\p{L}\\p{N}]?[" up "]*[" lo "]+" CONTRACTION "?|[^\\r\\n\\p{L}\\p{N}]?[" up "]+[" lo "]*" CONTRACTION \
    "?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+"
#define HF_QWEN2 CONTRACTION HF_LETTERS "\\p{N}" HF_OTHERS
#define HF_TEKKEN                                                                                               \
    "[^\\r\\n\\p{L}\\p{N}]?[" HF_UPPER "]*[" HF_LOWER "]+|[^\\r\\n\\p{L}\\p{N}]?[" HF_UPPER "]+[" HF_LOWER \
    "]*|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*" HF_SPACES

/* One pre-tokenizer. */
static const struct pre_tokenizer {
    const char *names;                 /* values of tokenizer.ggml.pre, the first of which moe-convert writes */
    bool nfc, ignore_merges, add_bos;  /* defaults for files without these keys */
    const char *expr[VOCAB_MAX_EXPRS]; /* for PCRE2 */
    const char *hf[VOCAB_MAX_EXPRS];   /* as in tokenizer.json; none: moe-convert does not know it */
} pre_tokenizers[] = {
    {.names = "gpt-2 phi-2 gigachat a.x-4.0 mellum modern-bert exaone4 mpt jais trillion granite-docling",
     .expr = {GPT2},
     .hf = {HF_GPT2}},
    {.names = "olmo", .nfc = true, .expr = {GPT2}, .hf = {HF_GPT2}},
    {.names = "refact starcoder smollm mellum2", .expr = {"\\p{N}", GPT2}, .hf = {"\\p{N}", HF_GPT2}},
    {.names = "default", .expr = {"[\\p{P}$+<=>^~|]+", GPT2, "\\p{N}+", "[0-9][0-9][0-9]"}},
    {.names = "deepseek-llm",
     .expr = {"[\\r\\n]", "[" WS "]?[" DEEPSEEK_LETTERS "]+", "[" WS "]?[" DEEPSEEK_MARKS "]+",
              "(?<![" WS "])[" WS "]++\\z", DEEPSEEK_CJK, "\\p{N}"},
     .hf = {"[\\r\\n]",
            "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
            "\\s?[!-/:-~！-／：-～‘-‟　-。]+", "\\s+$", "[一-龥ࠀ-一가-퟿]+", "\\p{N}+"}},
    {.names = "deepseek-coder",
     .expr = {"[\\r\\n]", "[" WS "]?\\p{L}+", "[" WS "]?\\p{P}+", DEEPSEEK_CJK, "\\p{N}"},
     .hf = {"[\\r\\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", "[一-龥ࠀ-一가-퟿]+", "\\p{N}"}},
    {.names = "deepseek-v3 joyai-llm hunyuan-dense hy_v4",
     .expr = {"\\p{N}{1,3}", "[\\x{4e00}-\\x{9fa5}\\x{3040}-\\x{30ff}]+",
              DEEPSEEK_WORDS},
     .hf = {"\\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
            " ?[\\p{P}\\p{S}]+[\\r\\n]*" HF_SPACES}},
    {.names = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
     .ignore_merges = true, .add_bos = true, .expr = {LLAMA3},
     .hf = {CONTRACTION HF_LETTERS "\\p{N}{1,3}" HF_OTHERS}},
    {.names = "glm4 glm5", .ignore_merges = true, .expr = {LLAMA3}},
    {.names = "chatglm-bpe dbrx smaug-bpe", .expr = {LLAMA3},
     .hf = {CONTRACTION HF_LETTERS "\\p{N}{1,3}" HF_OTHERS}},
    {.names = "qwen2", .nfc = true, .expr = {QWEN2}, .hf = {HF_QWEN2}},
    {.names = "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", .expr = {QWEN2}},
    {.names = "qwen35", .nfc = true,
     .expr = {CONTRACTION "|" WORD_PREFIX "[\\p{L}\\p{M}]+|\\p{N}| ?[^" WS "\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|"
              LINES_BLANKS},
     .hf = {CONTRACTION "|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*" HF_SPACES}},
    {.names = "laguna", .expr = {LINE_RUNS, QWEN2}, .hf = {"(?:\\r?\\n)+(?!\\r?\\n)" HF_WITH_NEXT, HF_QWEN2}},
    {.names = "bailingmoe2 bailingmoe llada-moe",
     .expr = {"'(?i:[sdmt]|ll|ve|re)|" WORD_PREFIX "+\\p{L}+|\\p{N}|" SYMBOLS "+[\\r\\n]*|[" WS "]*[\\r\\n]|" BLANKS},
     .hf = {"'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|"
            "\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"}},
    {.names = "exaone-moe",
     .expr = {CONTRACTION "|" WORD_PREFIX "\\p{L}(?:[\\p{L}\\p{M}]++| (?=\\p{L}))*+|\\p{N}|" SYMBOLS "[\\r\\n/]?|[" WS
              "]*[\\r\\n]|" BLANKS},
     .hf = {CONTRACTION "|[^\\r\\n\\p{L}\\p{N}]?(?:\\p{L}\\p{M}*(?: \\p{L}\\p{M}*)*)+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]?|"
            "\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"}},
    {.names = "afmoe", /* runs of digits, of each what is left of threes, then threes */
     .expr = {"\\p{N}+", "\\A\\p{N}{1,2}(?=(?:\\p{N}{3})*+\\z)", "\\p{N}{3}",
              "[\\x{4e00}-\\x{9fff}\\x{3400}-\\x{4dbf}\\x{f900}-\\x{faff}\\x{3040}-\\x{30ff}\\x{ff65}-\\x{ff9f}\\x{2f00}-\\x{2fdf}"
              "\\x{e40}-\\x{eff}\\x{1780}-\\x{17ff}\\x{1000}-\\x{109f}\\x{aa60}-\\x{aa7f}\\x{a9e0}-\\x{a9ff}\\x{ac00}-\\x{d7af}"
              "\\x{1100}-\\x{11ff}]+",
              DEEPSEEK_WORDS}},
    {.names = "tiny_aya cohere2moe", /* as afmoe, of digits that no word goes on from */
     .expr = {"(?<!\\p{Nd})\\p{Nd}++(?![\\p{L}\\p{M}\\p{Nl}\\p{Pc}])", "\\A\\p{Nd}{1,2}(?=(?:\\p{Nd}{3})*+\\z)", "\\p{Nd}{3}",
              CASED(UPPER, LOWER) "|\\p{N}{1,3}|" SYMBOLS "[\\r\\n/]*|" LINES_BLANKS},
     .hf = {"\\d{1,3}(?=(?:\\d{3})*\\b)", HF_CASED(HF_UPPER, HF_LOWER) "[\\r\\n/]*" HF_SPACES}},
    {.names = "seed-coder",
     .expr = {CONTRACTION "|" WORD_PREFIX "\\p{L}+|\\p{N}|" SYMBOLS "|" LINES_BLANKS},
     .hf = {CONTRACTION HF_LETTERS "\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\\r\\n]+" HF_SPACES}},
    {.names = "tekken", .ignore_merges = true, .add_bos = true, .expr = {TEKKEN}, .hf = {HF_TEKKEN}},
    {.names = "gpt-4o llama4 kanana2 talkie minimax-m2 inkling inkling2",
     .expr = {CASED(UPPER, LOWER) "|\\p{N}{1,3}|" SYMBOLS "[\\r\\n/]*|" LINES_BLANKS},
     .hf = {HF_CASED(HF_UPPER, HF_LOWER) "[\\r\\n/]*" HF_SPACES}},
    {.names = "kimi-k2", .ignore_merges = true,
     .expr = {"\\p{sc:Han}+|" CASED(UPPER_XHAN, LOWER_XHAN) "|\\p{N}{1,3}|" SYMBOLS "[\\r\\n]*|" LINES_BLANKS},
     .hf = {"[\\p{Han}]+|" HF_CASED(HF_UPPER "&&[^\\p{Han}]", HF_LOWER "&&[^\\p{Han}]") "[\\r\\n]*" HF_SPACES}},
};
/* clang-format on */

enum { N_PRE_TOKENIZERS = sizeof pre_tokenizers / sizeof *pre_tokenizers };

#endif
