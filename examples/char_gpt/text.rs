//! Lines of text as batches of characters.

use anyhow::{Context, ensure};
use burn::data::dataloader::batcher::Batcher;
use burn::prelude::*;
use firebox::{MicroBatch, weight};

/// What fills a line up to the length of the longest in its batch.
pub const PADDING: i32 = 0;
/// Where a line begins and ends.
pub const END: i32 = 1;
/// Any character that is not ASCII.
const OTHER: i32 = 2;
/// The token of a space; those of other printable characters follow.
const FIRST: i32 = 3;
/// How many tokens there are.
pub const TOKENS: usize = FIRST as usize + 95;
/// The longest line, in characters; what is longer is cut.
pub const LONGEST: usize = 128;

/// A batch of lines.
#[derive(Clone, Debug, MicroBatch)]
pub struct Lines<B: Backend> {
    /// `[lines, length]`
    pub tokens: Tensor<B, 2, Int>,
    /// `[lines, length]`, the token that follows each.
    pub next: Tensor<B, 2, Int>,
}

impl<B: Backend> Lines<B> {
    /// How many characters are to be predicted: what the loss is a mean over.
    pub fn characters(&self) -> f64 {
        weight::real_tokens(&self.next, &[PADDING.into()])
    }
}

#[derive(Clone, Debug)]
pub struct LineBatcher;

impl LineBatcher {
    pub fn of<B: Backend>(lines: Vec<String>, device: &B::Device) -> Lines<B> {
        let lines: Vec<Vec<i32>> = lines.iter().map(|line| tokens(line)).collect();
        let length = lines.iter().map(Vec::len).max().unwrap_or_default() + 1;
        let padded = |begin: &[i32], line: &[i32], end: &[i32]| {
            let line = [begin, line, end].concat();
            let padding = std::iter::repeat_n(PADDING, length - line.len());
            line.into_iter().chain(padding).collect::<Vec<_>>()
        };
        let tensor = |rows: Vec<Vec<i32>>| {
            Tensor::from_data(TensorData::new(rows.concat(), [lines.len(), length]), device)
        };
        Lines {
            tokens: tensor(lines.iter().map(|line| padded(&[END], line, &[])).collect()),
            next: tensor(lines.iter().map(|line| padded(&[], line, &[END])).collect()),
        }
    }
}

impl<B: Backend> Batcher<B, String, Lines<B>> for LineBatcher {
    fn batch(&self, lines: Vec<String>, device: &B::Device) -> Lines<B> {
        Self::of(lines, device)
    }
}

fn tokens(line: &str) -> Vec<i32> {
    let token = |character: char| match character {
        ' '..='~' => FIRST + (character as i32 - ' ' as i32),
        _ => OTHER,
    };
    line.chars().take(LONGEST).map(token).collect()
}

/// The character of a token.
pub fn character(token: i32) -> char {
    match token {
        FIRST.. => char::from_u32((token - FIRST) as u32 + ' ' as u32).unwrap_or('?'),
        _ => '·',
    }
}

/// The lines of this repository's documents: nine of ten to train on, and every tenth to validate.
/// The longest come first, so that the lines of a batch are about equally long.
pub fn lines() -> anyhow::Result<(Vec<String>, Vec<String>)> {
    let root = env!("CARGO_MANIFEST_DIR");
    let files = [
        "README.md",
        "CHANGELOG.md",
        "docs/ARCHITECTURE.md",
        "docs/upstream.md",
        "docs/design/device-failure.md",
        "docs/design/dry-device.md",
        "docs/design/executor.md",
        "docs/design/split-check.md",
        "docs/design/pool.md",
        "docs/design/threads.md",
    ];
    let mut all = Vec::new();
    for file in files {
        let path = format!("{root}/{file}");
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        let lines = text.lines().map(str::trim).filter(|line| line.len() > 1);
        all.extend(lines.map(str::to_owned));
    }
    ensure!(all.len() >= 20, "{root} holds no documents to learn from");
    all.sort_by_key(|line| std::cmp::Reverse(line.chars().count().min(LONGEST)));
    let (mut train, mut valid) = (Vec::new(), Vec::new());
    for (at, line) in all.into_iter().enumerate() {
        if at % 10 == 9 { valid.push(line) } else { train.push(line) }
    }
    Ok((train, valid))
}
