//! Parses `#[micro_batch(...)]` and checks it for contradictions, before `expand` writes the impl.
//! Every error points at its place in the source.

use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::{Attribute, Error, Expr, ExprPath, Lit, LitInt, Meta, Token};

/// The keys allowed on a field, for messages.
const FIELD_KEYS: &str = "`dim = ...`, `each` and `shared`";

/// The attributes of the struct.
#[derive(Default)]
pub struct StructOptions {
    /// The function that computes the weight. `None`: the number of items.
    pub weight: Option<ExprPath>,
}

/// The attributes of one field.
#[derive(Default)]
pub struct FieldOptions {
    /// The dimension that holds the items.
    pub dim: Option<LitInt>,
    /// Whether the field is a list in which every element is cut.
    pub each: bool,
    /// Whether every item uses the whole field.
    pub shared: bool,
}

/// Collects errors, so one compiler run shows all of them.
#[derive(Default)]
pub struct Errors(Option<Error>);

impl Errors {
    /// Adds an error.
    pub fn push(&mut self, error: Error) {
        match &mut self.0 {
            Some(errors) => errors.combine(error),
            None => self.0 = Some(error),
        }
    }

    /// Returns all errors as one, or `Ok` if there are none.
    pub fn finish(self) -> syn::Result<()> {
        self.0.map_or(Ok(()), Err)
    }

    fn at(&mut self, place: &impl quote::ToTokens, message: impl std::fmt::Display) {
        self.push(Error::new_spanned(place, message));
    }
}

impl StructOptions {
    /// Reads the attributes of the struct.
    pub fn read(attributes: &[Attribute], errors: &mut Errors) -> Self {
        let mut options = Self::default();
        for meta in metas(attributes, "`weight = path`", errors) {
            let key = key_of(&meta);
            match key.as_str() {
                "weight" if options.weight.is_some() => {
                    errors.at(&meta, "`weight` is given twice: keep one function");
                }
                "weight" => match weight_of(&meta) {
                    Ok(path) => options.weight = Some(path),
                    Err(error) => errors.push(error),
                },
                "dim" | "each" | "shared" => errors.at(
                    &meta,
                    format!("`{key}` belongs on a field: move it to the one that it is about"),
                ),
                _ => errors.at(
                    &meta,
                    format!(
                        "unknown key `{key}`: a struct takes `weight = path`, a field takes {FIELD_KEYS}"
                    ),
                ),
            }
        }
        options
    }
}

impl FieldOptions {
    /// Reads the attributes of a field.
    pub fn read(attributes: &[Attribute], errors: &mut Errors) -> Self {
        let mut options = Self::default();
        let mut seen: Vec<String> = Vec::new();
        for meta in metas(attributes, FIELD_KEYS, errors) {
            let key = key_of(&meta);
            if seen.contains(&key) {
                errors.at(&meta, format!("`{key}` is given twice: keep one"));
                continue;
            }
            if let Some(other) = contradiction(&key, &seen) {
                errors.at(
                    &meta,
                    format!(
                        "`{key}` contradicts `{other}`: `shared` gives every micro-batch the whole field, so keep one of them"
                    ),
                );
                continue;
            }
            let read = match key.as_str() {
                "dim" => dim_of(&meta).map(|dim| options.dim = Some(dim)),
                "each" => flag(&meta).map(|()| options.each = true),
                "shared" => flag(&meta).map(|()| options.shared = true),
                "weight" => Err(Error::new_spanned(
                    &meta,
                    "`weight` belongs on the struct: write `#[micro_batch(weight = path)]` above it, \
                     where `path` is a function that takes the batch",
                )),
                _ => Err(Error::new_spanned(
                    &meta,
                    format!("unknown key `{key}`: a field takes {FIELD_KEYS}"),
                )),
            };
            if let Err(error) = read {
                errors.push(error);
            }
            seen.push(key);
        }
        options
    }
}

/// The comma-separated parts of every `#[micro_batch(...)]` in `attributes`. `keys` lists the
/// allowed keys, for messages.
fn metas(attributes: &[Attribute], keys: &str, errors: &mut Errors) -> Vec<Meta> {
    let mut metas = Vec::new();
    for attribute in attributes {
        if !attribute.path().is_ident("micro_batch") {
            continue;
        }
        match attribute.meta.require_list() {
            Ok(list) if list.tokens.is_empty() => {
                errors.at(attribute, format!("nothing is said here: write one of {keys}"));
            }
            Ok(_) => {
                let parser = Punctuated::<Meta, Token![,]>::parse_terminated;
                match attribute.parse_args_with(parser) {
                    Ok(parsed) => metas.extend(parsed),
                    Err(error) => errors.push(error),
                }
            }
            Err(_) => errors.at(
                attribute,
                format!("write `#[micro_batch(...)]` with {keys} in the parentheses"),
            ),
        }
    }
    metas
}

fn key_of(meta: &Meta) -> String {
    let segments = meta.path().segments.iter();
    let names: Vec<_> = segments.map(|segment| segment.ident.to_string()).collect();
    names.join("::")
}

/// The key in `seen` that contradicts `key`, if any.
fn contradiction<'a>(key: &str, seen: &'a [String]) -> Option<&'a String> {
    seen.iter().find(|other| match key {
        "shared" => matches!(other.as_str(), "dim" | "each"),
        "dim" | "each" => *other == "shared",
        _ => false,
    })
}

fn flag(meta: &Meta) -> syn::Result<()> {
    let key = key_of(meta);
    match meta {
        Meta::Path(_) => Ok(()),
        _ => Err(Error::new_spanned(
            meta,
            format!("`{key}` takes no value: write `#[micro_batch({key})]`"),
        )),
    }
}

fn dim_of(meta: &Meta) -> syn::Result<LitInt> {
    let wrong = |place: &dyn quote::ToTokens| {
        Error::new(
            place.span(),
            "`dim` takes the number of a dimension, counted from 0, as in `dim = 1`",
        )
    };
    match meta {
        Meta::NameValue(pair) => match ungrouped(&pair.value) {
            Expr::Lit(literal) => match &literal.lit {
                Lit::Int(dim)
                    if dim.base10_parse::<u16>().is_ok()
                        && matches!(dim.suffix(), "" | "usize") =>
                {
                    Ok(dim.clone())
                }
                other => Err(wrong(other)),
            },
            other => Err(wrong(other)),
        },
        _ => Err(wrong(meta)),
    }
}

fn weight_of(meta: &Meta) -> syn::Result<ExprPath> {
    let wrong = |place: &dyn quote::ToTokens, what: &str| {
        let message = format!(
            "`weight` {what} the path of a function from `&Self` to `f64`, as in `weight = Self::tokens`"
        );
        Error::new(place.span(), message)
    };
    match meta {
        Meta::NameValue(pair) => match ungrouped(&pair.value) {
            Expr::Path(path) => Ok(path.clone()),
            Expr::Lit(literal) if matches!(literal.lit, Lit::Str(_)) => {
                Err(wrong(literal, "takes, without quotes,"))
            }
            other => Err(wrong(other, "takes")),
        },
        _ => Err(wrong(meta, "takes")),
    }
}

/// The expression inside the invisible groups left by macro substitution.
fn ungrouped(mut expression: &Expr) -> &Expr {
    while let Expr::Group(group) = expression {
        expression = &group.expr;
    }
    expression
}
