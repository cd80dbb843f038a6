//! The training runs that are compared: models and batch sizes.
//!
//! Sizes marked as `near` a cliff were found with `--scan`: one more item, or one less, and the step opens or closes a
//! page. The others were chosen so that every model meets pages of every size.

use std::fmt;

/// One training run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// The model.
    pub model: &'static str,
    /// The items of a batch.
    pub items: usize,
    /// The items of a micro-batch; the whole batch if none.
    pub micro: Option<usize>,
    /// Whether there is a validation set, and a last batch that is smaller than the others.
    pub valid: bool,
    /// Whether a batch of another size within a tenth of this one needs another number of pages.
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

    /// The case of this name.
    pub fn named(name: &str) -> Option<Self> {
        CASES.iter().copied().find(|case| case.to_string() == name)
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
    case("mlp", 1000),
    case("mlp", 2000),
    case("mlp", 3000),
    case("mlp", 5000),
    case("mlp", 6000).split(2000),
    case("cnn", 100),
    case("cnn", 200),
    case("cnn", 300),
    case("cnn", 450),
    case("cnn", 300).validated(),
    case("resnet", 60),
    case("resnet", 100),
    case("resnet", 150),
    case("resnet", 220),
    case("unet", 100),
    case("unet", 200),
    case("unet", 300),
    case("unet", 400),
    case("unet", 300).split(100),
    case("encoder", 80),
    case("encoder", 130),
    case("encoder", 200),
    case("encoder", 300),
    case("gpt", 100),
    case("gpt", 160),
    case("gpt", 240),
    case("gpt", 350),
    case("gpt", 240).validated(),
    case("lstm", 2000),
    case("lstm", 3000),
    case("lstm", 4000),
    case("lstm", 6000),
    case("autoencoder", 200),
    case("autoencoder", 300),
    case("autoencoder", 400),
    case("autoencoder", 600),
    case("autoencoder", 400).validated(),
    case("siamese", 300),
    case("siamese", 450),
    case("siamese", 600),
    case("siamese", 900),
    case("siamese", 600).split(200),
    case("reader", 2000),
    case("reader", 3000),
    case("reader", 4000),
    case("reader", 6000),
    case("reader", 4000).validated(),
];

/// The cases that `cargo test` runs.
pub const FEW: &[&str] =
    &["mlp-3000", "cnn-300-validated", "unet-200", "gpt-160", "siamese-600-by-200", "reader-4000"];
