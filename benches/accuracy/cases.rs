//! The training runs that are compared: models and batch sizes.
//!
//! A size marked `near` lies close to a cliff: within a tenth of it there is a size whose step
//! opens another page. These sizes were found with `--scan` on lavapipe, for example
//! `--scan cnn 200 440 20`. Where two such sizes follow each other, the page lies between them.
//!
//! Each model has one case whose batch is not a multiple of the micro-batch, so the last
//! micro-batch is smaller.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, ensure};

/// One training run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// The model.
    pub model: &'static str,
    /// Items in a batch.
    pub items: usize,
    /// Items in a micro-batch; `None` means the whole batch.
    pub micro: Option<usize>,
    /// Whether there is a validation set, and a last batch smaller than the others.
    pub valid: bool,
    /// Whether a batch size within a tenth of this one needs a different number of pages.
    pub cliff: bool,
}

impl Case {
    const fn split(self, items: usize) -> Self {
        Self { micro: Some(items), ..self }
    }

    const fn validated(self) -> Self {
        Self { valid: true, ..self }
    }

    const fn near(self) -> Self {
        Self { cliff: true, ..self }
    }
}

/// Parses the format that [`Display`](fmt::Display) writes. The case need not be in the list.
impl FromStr for Case {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> anyhow::Result<Self> {
        if let Some(listed) = CASES.iter().find(|case| case.to_string() == name) {
            return Ok(*listed);
        }
        let shape = "a case is called MODEL-ITEMS, or MODEL-ITEMS-by-ITEMS, both with -validated or without";
        let (rest, valid) =
            name.strip_suffix("-validated").map_or((name, false), |rest| (rest, true));
        let (model, items) = rest.split_once('-').context(shape)?;
        let listed = CASES.iter().find(|case| case.model == model);
        let model = listed.with_context(|| format!("there is no model `{model}`"))?.model;
        let (items, micro) =
            items.split_once("-by-").map_or((items, None), |(items, micro)| (items, Some(micro)));
        let items: usize = items.parse().context(shape)?;
        let micro = micro.map(str::parse::<usize>).transpose().context(shape)?;
        ensure!(items > 0, "a batch has items");
        let splits = micro.is_none_or(|micro| (1..=items).contains(&micro));
        ensure!(splits, "a micro-batch has at least one item, and no more than its batch");
        Ok(Self { micro, valid, ..case(model, items) })
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.model, self.items)?;
        if let Some(micro) = self.micro {
            write!(f, "-by-{micro}")?;
        }
        if self.valid {
            write!(f, "-validated")?;
        }
        Ok(())
    }
}

const fn case(model: &'static str, items: usize) -> Case {
    Case { model, items, micro: None, valid: false, cliff: false }
}

/// All cases, model by model.
pub const CASES: &[Case] = &[
    case("mlp", 2400),
    case("mlp", 3900).near(),
    case("mlp", 4200).near(),
    case("mlp", 5000),
    case("mlp", 6000).split(2000),
    case("mlp", 5000).split(1900),
    case("cnn", 260),
    case("cnn", 340).near(),
    case("cnn", 360).near(),
    case("cnn", 450),
    case("cnn", 400).split(150),
    case("cnn", 300).validated(),
    case("resnet", 150),
    case("resnet", 220),
    case("resnet", 300),
    case("resnet", 400),
    case("resnet", 300).split(110),
    case("unet", 180),
    case("unet", 240).near(),
    case("unet", 260).near(),
    case("unet", 400),
    case("unet", 300).split(100),
    case("unet", 300).split(110),
    case("encoder", 180),
    case("encoder", 240).near(),
    case("encoder", 260).near(),
    case("encoder", 320),
    case("encoder", 300).split(130),
    case("gpt", 200),
    case("gpt", 260).near(),
    case("gpt", 280).near(),
    case("gpt", 350),
    case("gpt", 300).split(110),
    case("gpt", 240).validated(),
    case("lstm", 4000),
    case("lstm", 5000),
    case("lstm", 6000),
    case("lstm", 8000),
    case("lstm", 6000).split(2500),
    case("autoencoder", 500),
    case("autoencoder", 700),
    case("autoencoder", 900),
    case("autoencoder", 1200),
    case("autoencoder", 1000).split(350),
    case("autoencoder", 800).validated(),
    case("siamese", 650).near(),
    case("siamese", 700).near(),
    case("siamese", 900),
    case("siamese", 1200),
    case("siamese", 900).split(300),
    case("siamese", 1000).split(300),
    case("reader", 3000),
    case("reader", 4400).near(),
    case("reader", 6000),
    case("reader", 8000),
    case("reader", 8000).split(3000),
    case("reader", 5000).validated(),
];

/// The cases that `cargo test` runs, and the card of each where there is none: of the newest and
/// the oldest generation.
pub const FEW: &[(&str, &str)] =
    &[("mlp-6000-by-2000", "H100 80GB"), ("siamese-1000-by-300", "T4"), ("reader-3000", "T4")];
